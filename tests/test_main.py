"""`spillway` before any of its commands runs."""

import sys
from typing import Any

import pytest

from spillway.__main__ import main


class Interrupting:
    """Finds the command line's module as somebody presses Ctrl-C."""

    def find_spec(self, name: str, *_: Any) -> None:
        if name == "spillway.cli.main":
            raise KeyboardInterrupt


def test_ctrl_c_while_python_still_imports_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delitem(sys.modules, "spillway.cli.main", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Interrupting(), *sys.meta_path])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 130
    assert capsys.readouterr().err == "spillway: stopped before anything was begun\n"


def test_the_command_exits_with_the_code_of_what_went_wrong(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["spillway", "report", "no-such-run"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert "spillway: no-such-run is not a run directory" in capsys.readouterr().err
