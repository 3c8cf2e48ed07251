"""The tables of the README, made from the records in this folder.

python experiments/tables.py            exit status 1 if the README says anything else
python experiments/tables.py --write    write them into the README
python experiments/tables.py --demo runs/demo    record a finished demo as demo.json first
"""

import argparse
import json
import re
import statistics
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
README = HERE.parent / "README.md"


def markdown(header: list[str], rows: list[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (header, ["---"] * len(header), *rows))


def records(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (HERE / name).read_text(encoding="utf-8").splitlines()]


CONTROLS = {"ddl-cc": "ddl-cc-ec"}
"""Schemes that were not tuned themselves but run at the best point of another."""


def tuned() -> dict[str, tuple[tuple[float, ...], list[float]]]:
    """For every scheme of the sweep its best point over three seeds: (lr, embedding, hidden), losses by seed."""
    points: dict[str, dict[tuple[float, ...], dict[int, float]]] = {}
    for row in records("tune-demo.jsonl"):
        point = row["lr"], row["embedding_init_std"], row["hidden_init_std_factor"]
        points.setdefault(row["scheme"], {}).setdefault(point, {})[row["seed"]] = row["val_loss"]
    best = {}
    for scheme, found in points.items():
        whole = {point: [losses[s] for s in sorted(losses)] for point, losses in found.items() if len(losses) == 3}
        point = min(whole, key=lambda point: statistics.mean(whole[point]))
        best[scheme] = (point, whole[point])
    return best


def sweep_table() -> str:
    best = tuned()
    counts: dict[str, int] = {}
    for row in records("tune-demo.jsonl"):
        counts[row["scheme"]] = counts.get(row["scheme"], 0) + 1
    baseline = best["residual"][1]
    rows = []
    for scheme, ((lr, embedding, hidden), losses) in best.items():
        paired = [loss - base for loss, base in zip(losses, baseline, strict=True)]
        versus = f"{statistics.mean(paired):+.3f} ± {statistics.stdev(paired):.3f}"
        loss = f"{statistics.mean(losses):.3f} ± {statistics.stdev(losses):.3f}"
        name = f"`{scheme}`" + (f", a control at the settings of `{CONTROLS[scheme]}`" if scheme in CONTROLS else "")
        rows.append([name, str(counts[scheme]), f"{lr:g}", f"{embedding:g}", f"{hidden:g}", loss,
                     "baseline" if scheme == "residual" else versus])  # fmt: skip
    header = ["scheme", "runs of the sweep", "learning rate", "embedding std", "hidden factor", "validation loss",
              "difference, seed by seed"]  # fmt: skip
    return markdown(header, rows)


def demo_table() -> str:
    record = json.loads((HERE / "demo.json").read_text(encoding="utf-8"))
    rows = []
    for group in record["groups"]:
        difference = group["difference"]["mean"] if group["name"] != record["baseline"] else None
        rows.append(
            [
                f"`{group['name']}`",
                f"{group['val_loss']['mean']:.4f}",
                "baseline" if difference is None else f"{difference:+.4f}",
                f"{group['parameters']:,}",
                f"{group['tokens_per_second']['mean']:,.0f}",
                f"{group['seconds']['mean']:.0f}",
            ]
        )
    return markdown(["scheme", "validation loss", "difference", "parameters", "tokens/s", "seconds"], rows)


def speed_table() -> str:
    rows = []
    for record in records("bench-models-cpu.jsonl"):
        ratio = record["ratio"]
        rows.append(
            [
                f"`{record['preset']}`",
                f"{record['median_seconds'] * 1000:.0f}",
                "1" if record["preset"] == record["baseline"] else
                f"{ratio['median']:.3f} [{ratio['lower']:.3f}, {ratio['upper']:.3f}]",
                f"{record['parameters']:,}",
            ]
        )  # fmt: skip
    return markdown(["preset", "ms per step", "ratio to `residual` [quartiles]", "parameters"], rows)


TABLES = {"sweep": sweep_table, "demo": demo_table, "speed": speed_table}


def filled(text: str) -> str:
    """`text` with every table between its markers made anew."""
    for name, table in TABLES.items():
        pattern = rf"(<!-- {name}: experiments/tables.py -->\n).*?(\n<!-- /{name} -->)"
        text, count = re.subn(pattern, lambda match: match[1] + table() + match[2], text, flags=re.DOTALL)  # noqa: B023
        if count != 1:
            raise SystemExit(f"README.md: expected the markers of {name} once, found them {count} times")
    return text


def record_demo(folder: Path) -> None:
    """Write demo.json: the comparison of the runs in `folder`, and the facts of their process."""
    from residua.demo import RECIPES
    from residua.evaluation.compare import compare

    comparison = compare([folder / name for name in RECIPES]).to_json()
    for group in comparison["groups"]:
        group.pop("folders")
    facts = json.loads((folder / "residual" / "facts.json").read_text(encoding="utf-8"))
    (HERE / "demo.json").write_text(json.dumps({**comparison, "facts": facts}, indent=1) + "\n", encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the tables into the README")
    parser.add_argument("--demo", type=Path, metavar="DIR", help="record the demo in this folder as demo.json first")
    arguments = parser.parse_args()
    if arguments.demo:
        record_demo(arguments.demo)
    text = README.read_text(encoding="utf-8")
    made = filled(text)
    if arguments.write:
        README.write_text(made, encoding="utf-8")
        return 0
    if made != text:
        print("README.md does not say what the records say: python experiments/tables.py --write", file=sys.stderr)
    return int(made != text)


if __name__ == "__main__":
    sys.exit(main())
