"""The command `residua demo`."""

import shlex
from textwrap import wrap

from residua.commands.compare import compared
from residua.commands.signature import Output
from residua.errors import Count


def demo(*, out: str = "runs/demo", steps: Count | None = None) -> int | Output:
    """Train ddl-tc (DDL-TC w/o EC in the paper), the plain residual and a control, and compare.

    Examples:
        residua demo
        residua demo --steps 50 --out runs/quick

    Args:
        out (DIR): folder of the runs
        steps: training steps of each run (default: as in the recipes)
    """
    try:
        from residua.lab.demo import demonstrate

        result = demonstrate(out, steps=steps)
    except KeyboardInterrupt:
        shortened = [] if steps is None else ["--steps", str(steps)]
        command = shlex.join(["residua", "demo", "--out", out, *shortened])
        raise KeyboardInterrupt(f"interrupted; resume with: {command}") from None
    parts = [*compared(result.comparison), *(f"picture: {path}" for path in result.pictures)]
    parts.append(f"open in a browser: {result.page}")
    for name, text in result.texts.items():
        parts += [f"\n{name} writes:", *(f"  {line}" for line in wrap(text, 78)[:3])]
    return Output(result.comparison.to_json(), parts)
