"""The command `residua demo`."""

import shlex
import textwrap

from residua.commands.base import INTERRUPTED, fail
from residua.commands.compare import print_comparison


def demo(*, out: str = "runs/demo", steps: int | None = None) -> int:
    """Train ddl-tc, the plain residual and a control, and compare.

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
        return fail(f"interrupted; resume with: {command}", INTERRUPTED)
    print_comparison(result.comparison)
    for path in result.pictures:
        print(f"picture: {path}")
    print(f"open in a browser: {result.page}")
    for name, text in result.texts.items():
        print(f"\n{name} writes:")
        print("\n".join(f"  {line}" for line in textwrap.wrap(text, 78)[:3]))
    return 0
