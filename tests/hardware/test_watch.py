"""What is taken in each phase of a run."""

from spillway.hardware.watch import MemoryWatch

BLOCK = 64 << 20


def test_each_phase_has_its_own_peak() -> None:
    with MemoryWatch("load", every_s=0.001) as watch:
        with watch.phase("step"):
            taken = bytearray(BLOCK)
            with watch.phase("save"):
                more = bytearray(BLOCK)
            del more
        del taken
    assert watch.peaks.keys() == {"load", "step", "save"}
    assert watch.peaks["load"] + 1.5 * BLOCK < watch.peaks["save"] == watch.peak
    assert watch.peaks["load"] + 0.5 * BLOCK < watch.peaks["step"] < watch.peaks["save"]
