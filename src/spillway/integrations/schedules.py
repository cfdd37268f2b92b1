"""Learning rate schedules by their Hugging Face names."""

from typing import Any

import transformers

from spillway.spec.errors import UsageError


def make_schedule(name: str, optimizer: Any, warmup_steps: int, total_steps: int, done_steps: int) -> Any:
    """The scheduler, as it is after `done_steps`. Raises UsageError for an unknown name."""
    try:
        schedule = transformers.get_scheduler(name, optimizer, warmup_steps, total_steps)
    except (ValueError, TypeError) as error:
        raise UsageError(f"lr_scheduler_type '{name}' cannot be used: {error}") from error
    if done_steps:
        schedule.load_state_dict({**schedule.state_dict(), "last_epoch": done_steps})
        for group, base, rule in zip(optimizer.param_groups, schedule.base_lrs, schedule.lr_lambdas, strict=True):
            group["lr"] = base * rule(done_steps)
    return schedule
