"""Write the tables and sentences of the pages from the records in this folder.

python experiments/pages.py            exit with status 1 if a page differs from the records
python experiments/pages.py --write    write the pages
python experiments/pages.py --demo runs/demo    record a finished demo as demo.json first, and draw it
"""

import argparse
import json
import sys
from functools import partial
from pathlib import Path

sys.path.extend(str(Path(__file__).parents[1] / folder) for folder in ("tools", "docs"))

import scheme_pages
import tables as made
from blocks import Blocks, pages_of, update
from sentences import filled

HERE = Path(__file__).parent

TABLES: dict[str, Blocks] = {
    "docs/study.md": {"study-keys": made.study_keys_table},
    "docs/schemes.md": {
        **{family.lower().replace(" ", "-"): partial(made.presets_table, family) for family in scheme_pages.FAMILIES},
        "more": made.more_presets,
        "shared-options": made.shared_options_table,
        "renamed-options": made.renamed_options_table,
    },
    "docs/transformers.md": {"engines": made.engines_table},
    "docs/speed.md": {
        "speed": made.speed_table,
        "peers": made.peers_table,
        "memory-small": made.memory_small_table,
        "generation": made.generation_table,
        "state-dtype": made.state_dtype_table,
    },
    "experiments/speed.md": {
        "speed-kept": partial(made.speed_table, replay=False),
        "connections": made.connections_table,
        "memory-depth": made.memory_depth_table,
        "memory-converted": made.memory_converted_table,
        "kernel-times": made.kernel_times_table,
        "kernels": made.kernels_table,
    },
    "docs/hugging-face.md": {
        "serving": partial(made.serving_table, "serving.jsonl"),
        "serving-convolutions": partial(made.serving_table, "serving-convolutions.jsonl"),
    },
    "docs/results.md": {"demo": made.demo_table, "sweep": made.sweep_table},
    "docs/reproduce.md": {
        "paper": made.paper_table,
        "runs": made.published_runs_table,
        "curves": made.published_curves_table,
        "results": made.results_table,
    },
    "docs/field.md": {"published": made.published_table},
    "docs/retrofit.md": {
        "largest": made.largest_logit,
        "preserved": made.preserved_table,
        "refused": made.refused_table,
        "verdict": made.verdict_table,
        "connections": partial(made.retrofit_table, "connections"),
        "all": partial(made.retrofit_table, "all"),
        "learned": made.learned_table,
    },
    "docs/geometry.md": {
        "ours": partial(made.sequences_table, "ours"),
        "references": partial(made.sequences_table, "reference"),
        "published": made.published_losses_table,
    },
    "experiments/geometry/details.md": {
        "reflection": made.reflection_table,
        "sizes": made.full_references_table,
        "penalty": made.penalty_table,
        "starts": made.starts_table,
        "vectors": made.vectors_table,
    },
}
SENTENCES = pages_of(HERE / "sentences.md", filled)
PAGES = {page: {**TABLES.get(page, {}), **SENTENCES.get(page, {})} for page in {**TABLES, **SENTENCES}}


def record_demo(folder: Path) -> None:
    """Write demo.json, the comparison of the runs in `folder` and the metadata of their process, and its picture."""
    from residua.lab.demo import RECIPES, place_of
    from residua.lab.evaluation.compare import compare

    comparison = compare([place_of(folder, name) for name in RECIPES]).to_json()
    for group in comparison["groups"]:
        group.pop("folders")
    facts = json.loads((folder / "residual" / "facts.json").read_text(encoding="utf-8"))
    (HERE / "demo.json").write_text(json.dumps({**comparison, "facts": facts}, indent=1) + "\n", encoding="utf-8")
    made.draw_demo()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the pages")
    parser.add_argument("--demo", type=Path, metavar="DIR", help="record the demo in this folder as demo.json first")
    arguments = parser.parse_args()
    if arguments.demo:
        record_demo(arguments.demo)
    return update("experiments/pages.py", PAGES, write=arguments.write)


if __name__ == "__main__":
    sys.exit(main())
