"""Check other people's implementations of our schemes with the kit, and write docs/compliance.md from the records.

    python -m benchmarks.compliance                    check all, in processes of their own
    python -m benchmarks.compliance --only liger-mhc   check some again
    python -m benchmarks.compliance --page             write the page from the records

Packages come from the environment of this Python: torch, transformers, hyper-connections, mhc, attn-res, liger-kernel,
flash-linear-attention, flash-attn-res, fast-attnres, and torchtitan and megatron-core (pip install --no-deps). Code
without a package is cloned into runs/compliance/OWNER+NAME@COMMIT, at the commit that stands here; a folder of that
name without git is taken as it is. A record holds the versions.
"""

import __future__

import argparse
import ast
import importlib
import inspect
import json
import os
import platform
import subprocess
import sys
import textwrap
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import distribution
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from benchmarks import adapters, compliance_adapters, delta_adapters
from residua.lab.records.provenance import version
from residua.testing import SPECIFICATION
from residua.testing.adapter import Adapter, Pair
from residua.testing.checks import run
from residua.testing.inputs import recorded
from residua.testing.module import CHECKS

ROOT = Path(__file__).parents[1]
RECORDS = ROOT / "experiments" / "compliance.jsonl"
PAGE = ROOT / "docs" / "compliance.md"
CLONES = ROOT / "runs" / "compliance"
COMPUTES = ("parameters", "forward", "gradients")
"""Checks that pass if it computes what our scheme computes; the others are about training it."""


@dataclass(frozen=True)
class Implementation:
    """One implementation.

    package: what pip installs, or owner/name on GitHub with the `commit`, its `date` and the `paths` to check out.
    definitions: the names that are executed of a file, without its imports, by the file. read: what reading it shows,
        or why it cannot be read, if it cannot be run.
    start: why its parameters start otherwise than our scheme's, if they do: a choice, not a mistake.
    instead: what it computes in place of our scheme, after reading it, if it does; the adapter's `statements` are
        checked too. environment: variables that it needs. absent: words that no file of the package has.
    """

    name: str
    package: str
    module: str
    attribute: str
    preset: str
    adapter: Callable[[Any, str], Adapter] | None = None
    commit: str = ""
    paths: tuple[str, ...] = ()
    start: str = ""
    instead: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)
    absent: tuple[str, ...] = ()
    date: str = ""
    definitions: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    read: str = ""


def _transformers(name: str, family: str, attribute: str, preset: str, adapter: Any) -> Implementation:
    module = f"transformers.models.{family}.modeling_{family}"
    return Implementation(name, "transformers", module, attribute, preset, adapter)


INTERPRETED = {"TRITON_INTERPRET": "1"}
IMPLEMENTATIONS = (
    _transformers("deepseek-v4", "deepseek_v4", "DeepseekV4HyperConnection", "mhc-deepseek", adapters.DeepSeekV4),
    _transformers("glm5-next", "glm5_next", "Glm5NextTextHyperConnection", "mhc-glm", compliance_adapters.Glm5Next),
    _transformers("hy-v4", "hy_v4", "HYV4HyperConnection", "ihc", adapters.HunYuanV4),
    _transformers("hy-v4-vl", "hy_v4_vl", "HYV4VLHyperConnection", "ihc", compliance_adapters.HunYuanV4VL),
    _transformers(
        "qwen4-exp", "qwen4_exp", "Qwen4ExpTextGatedResidual", "gated-residual", compliance_adapters.Qwen4Exp
    ),
    _transformers(
        "inkling2",
        "inkling2",
        "Inkling2BlockAttentionResidual",
        "attnres-inkling",
        compliance_adapters.Inkling2,
    ),
    _transformers(
        "inkling2-loop",
        "inkling2_loop",
        "Inkling2LoopBlockAttentionResidual",
        "attnres-inkling",
        compliance_adapters.Inkling2Loop,
    ),
    _transformers("gemma3n", "gemma3n", "Gemma3nTextAltUp", "altup", compliance_adapters.Gemma3nAltUp),
    Implementation(
        "lucidrains-hc",
        "hyper-connections",
        "hyper_connections",
        "HyperConnections",
        "hc",
        adapters.LucidrainsHC,
    ),
    Implementation(
        "lucidrains-mhc",
        "hyper-connections",
        "hyper_connections",
        "mHC",
        "mhc",
        compliance_adapters.PerStreamMHC,
        instead="compared with the part that depends on the token at 0, as no parameters of ours fit it",
    ),
    Implementation(
        "megatron-mhc",
        "NVIDIA/Megatron-LM",
        "megatron.core.transformer.hyper_connection",
        "HyperConnectionModule",
        "mhc",
        compliance_adapters.Megatron,
        commit="d98e8a64ddf34856e74b24714e3bedb2f5a39553",
        paths=("megatron/core",),
        start="its projection is drawn by Xavier's rule and its biases are 0",
        environment={"TORCHDYNAMO_DISABLE": "1"},
    ),
    Implementation(
        "megatron-core-wheel",
        "megatron-core",
        "megatron.core.transformer.hyper_connection",
        "HyperConnectionModule",
        "mhc",
        absent=("HyperConnection",),
    ),
    Implementation(
        "liger-mhc",
        "liger-kernel",
        "liger_kernel.transformers.mhc",
        "LigerMHC",
        "mhc",
        adapters.LigerMHC,
        start="its projection is drawn with a standard deviation of 0.02, its scales are 1 and its biases 0",
        environment=INTERPRETED,
    ),
    Implementation(
        "tokenbender-mhc",
        "tokenbender/mHC-manifold-constrained-hyper-connections",
        "hyper_connections.hyper_connections_mhc",
        "HyperConnections",
        "mhc",
        compliance_adapters.Tokenbender,
        commit="088310e54680375e7647f02c811874f7c11a690d",
        paths=("hyper_connections",),
    ),
    Implementation("mhc-skip", "mhc", "mhc", "MHCSkip", "mhc", compliance_adapters.HistoryWithStatements),
    Implementation(
        "liger-attnres",
        "liger-kernel",
        "liger_kernel.transformers.functional",
        "liger_attn_res",
        "attnres",
        compliance_adapters.LigerAttnRes,
        environment=INTERPRETED,
    ),
    Implementation(
        "fla-naive-attnres",
        "flash-linear-attention",
        "fla.ops.attnres",
        "naive_attnres",
        "attnres",
        adapters.NaiveAttnRes,
    ),
    Implementation(
        "fla-fused-attnres",
        "flash-linear-attention",
        "fla.ops.attnres",
        "fused_attnres",
        "attnres",
        adapters.FusedAttnRes,
        environment=INTERPRETED,
    ),
    Implementation("attn-res", "attn-res", "attn_res", "AttnResOperator", "attnres", adapters.AttnRes),
    Implementation(
        "flash-attn-res",
        "flash-attn-res",
        "flash_attn_res",
        "phase_1_batched_attention_triton_op",
        "attnres",
        adapters.FlashAttnRes,
        environment=INTERPRETED,
    ),
    Implementation(
        "fast-attnres",
        "fast-attnres",
        "attnres",
        "attnres",
        "attnres",
        compliance_adapters.FastAttnRes,
    ),
    Implementation(
        "torchtitan-attnres",
        "torchtitan",
        "torchtitan",
        "AttnRes",
        "attnres",
        absent=("AttnRes", "attn_res", "AttentionResidual"),
    ),
    Implementation(
        "authors-scalar",
        "yifanzhang-pro/deep-delta-learning",
        "model/DDL-vdim1-gpt-mha-rope.py",
        "DeepDeltaResidualVdim1",
        "ddl",
        delta_adapters.AuthorsScalar,
        commit="2b55f2511502ac91df5e595b94de9cfb8528bc23",
        date="2026-07-27",
        definitions={"model/DDL-vdim1-gpt-mha-rope.py": ("_logit", "DeepDeltaResidualVdim1")},
        start="its model draws all weights afterwards, as `init='authors'`",
    ),
    Implementation(
        "authors-channels",
        "yifanzhang-pro/deep-delta-learning",
        "model/DDL-gpt-mha-rope-CC-EC.py",
        "DeepDeltaResidualExpanded",
        "ddl-cc",
        delta_adapters.AuthorsChannels,
        commit="2b55f2511502ac91df5e595b94de9cfb8528bc23",
        date="2026-07-27",
        definitions={
            "model/DDL-gpt-mha-rope-CC-EC.py": ("_logit", "ResidualShortConvCompressor", "DeepDeltaResidualExpanded")
        },
        start="its model draws all weights afterwards, as `init='authors'`",
    ),
    Implementation(
        "authors-fused",
        "yifanzhang-pro/deep-delta-learning",
        "model/DDL-gpt-mha-rope-CC-EC-accelerated.py",
        "DeepDeltaResidualExpanded",
        "ddl-cc",
        delta_adapters.AuthorsFused,
        commit="2b55f2511502ac91df5e595b94de9cfb8528bc23",
        date="2026-07-27",
        definitions={
            "model/DDL_utils.py": (
                "_build_new_weight_ShortConvFn",
                "_build_w_eff_ShortConvFn",
                "_fwd_kernel_ShortConvFn",
                "_ShortConvFn",
                "fwd_delta_kernel",
                "bwd_delta_kernel",
                "FusedDeepDeltaFunction",
            ),
            "model/DDL-gpt-mha-rope-CC-EC-accelerated.py": (
                "_logit",
                "ResidualShortConvCompressor",
                "DeepDeltaResidualExpanded",
            ),
        },
        start="its model draws all weights afterwards, as `init='authors'`",
        environment=INTERPRETED,
    ),
    Implementation(
        "authors-current",
        "yifanzhang-pro/deep-delta-learning",
        "model/DDL-gpt-mha-rope-TC.py",
        "DeepDeltaResidualExpanded",
        "ddl-tc",
        delta_adapters.AuthorsCurrent,
        commit="d1f76215c999be3089fe3132fe30e7a63dc8bbcb",
        definitions={
            "model/modules/ddl_shortconv.py": (
                "_has_configured_activation",
                "_TemporalShortConvSpec",
                "_TemporalShortConvCompatView",
                "TemporalResidualShortConvCompressor",
            ),
            "model/DDL-gpt-mha-rope-TC.py": ("_logit", "DeepDeltaResidualExpanded"),
        },
        start="its model draws all weights afterwards, as `init='rewrite'`",
    ),
    Implementation(
        "vukrosic",
        "vukrosic/deep-delta-learning-research",
        "models/deepdelta.py",
        "DeepDeltaRes",
        "ddl",
        delta_adapters.Product,
        commit="a36c710155af36d97599c0ae5a44abfaa72ee535",
        date="2026-01-18",
        definitions={"models/deepdelta.py": ("DeepDeltaRes",)},
        instead="its block drops features of the state after each connection, not of the update",
        start="its maps start as PyTorch draws them",
    ),
    Implementation(
        "5-dollar-llm",
        "RohanKhanBD/5-dollar-llm",
        "models/deepdelta.py",
        "DeepDeltaRes",
        "ddl",
        delta_adapters.Product,
        commit="0a127d380c303a40c03b36abe87e901c1b89501a",
        date="2026-01-18",
        definitions={"models/deepdelta.py": ("DeepDeltaRes",)},
        instead="its block drops features of the state after each connection, not of the update",
        start="its maps start as PyTorch draws them",
    ),
    Implementation(
        "shrijeeth",
        "Shrijeeth/Deep-Delta-Learning-LM",
        "v3/model.py",
        "DeltaLatentUpdate",
        "ddl-v",
        delta_adapters.Latent,
        commit="d2a1c49deb135d02ad1ae17953ec7d8d3ce08982",
        date="2026-01-12",
        definitions={"v3/model.py": ("DeltaLatentUpdate",)},
        instead="the general block of the paper's first version: the v-Map with k and beta from the state as it is, "
        "where the second version has them from its norm; its v1 and v2 have the same class",
    ),
    Implementation(
        "twice-scaled",
        "a file without a repository",
        "ddl.py",
        "DeltaResidualScalar",
        "ddl",
        delta_adapters.TwiceScaled,
        date="found in November 2026",
        definitions={"ddl.py": ("RMSNorm", "DeltaGate", "DeltaResidualScalar")},
    ),
    Implementation(
        "dragon",
        "Dragon-LLM/Megatron-LM",
        "megatron/core/dragon/dragon_ddl.py",
        "DeepDeltaResidualExpanded",
        "ddl-tc",
        delta_adapters.Dragon,
        commit="88e994033b9bb0667e5ea7ee2a6607b0e3b006f1",
        definitions={
            "megatron/core/dragon/dragon_ddl.py": (
                "_logit",
                "DepthwiseShortConv1d",
                "ResidualShortConvCompressor",
                "DeepDeltaResidualExpanded",
            )
        },
        instead="compared with layers whose factor for the depth is 1",
        start="its maps start as Megatron draws them",
    ),
    Implementation(
        "parameter-golf",
        "openai/parameter-golf",
        "records/track_10min_16mb/2026-03-25_VRL_FullGPTQ_NgramKNN_1.0970/train_gpt.py",
        "DDLGate",
        "ddl",
        delta_adapters.ConstantGate,
        commit="c458ceffd39aa103a914a228c6561428216eac1c",
        date="pull request 738, 2026-03-25",
        definitions={
            "records/track_10min_16mb/2026-03-25_VRL_FullGPTQ_NgramKNN_1.0970/train_gpt.py": ("DDLGate",),
        },
        instead="switched off by default; to be DDL it would need a direction from the output or the token, a gate in "
        "(0, 2) from the token, and a value to write along the direction",
        start="its direction is drawn and its strength is -0.1",
    ),
    Implementation(
        "deep-delta-rs",
        "tuned-org-uk/deep-delta-rs",
        "src/delta.rs",
        "delta_update",
        "ddl",
        commit="f88497d9d061dc4afd519ce0e26614ce932cf64b",
        read="written in Rust, and read only: k / (|k| + eps), a gate 2 sigmoid behind tanh and v as an MLP, all from "
        "the mean over the channels, are those of the paper's first version, as in `DeltaResidual`. No sublayer is "
        "in it. k is normalised twice, which changes only rounding; `delta_operator` is right for a k of length 1",
    ),
    Implementation(
        "ddl-umamba",
        "dishantdas2004/DDL-UMamba",
        "",
        "DDL-CC",
        "ddl-cc",
        read="its code could not be had. By its README a DDL with channel compression at every voxel replaces the "
        "addition of U-Mamba, k, beta and v come from one head, so that k is not the sublayer's output, and a loss "
        "trains beta towards the boundaries of labels",
    ),
)


def checked(one: Implementation) -> dict[str, Any]:
    """Return the record of one implementation."""
    record: dict[str, Any] = {
        "name": one.name,
        "package": one.package,
        "version": one.commit or ("" if one.read or one.definitions else distribution(one.package).version),
        "date": one.date,
        "attribute": one.attribute,
        "preset": one.preset,
        "specification": SPECIFICATION,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": version("triton"),
        "environment": dict(one.environment),
    }
    if one.read:
        return record | {"not_run": one.read}
    if one.adapter is None:
        return record | _absent(one)
    try:
        imported = executed(one) if one.definitions else importlib.import_module(one.module)
        subject = getattr(imported, one.attribute)
    except Exception as error:  # of somebody else's package
        return record | {"not_run": f"importing it fails: {type(error).__name__}: {_first_line(error)}"}
    record |= {"file": one.module} if one.definitions else _place(subject)
    adapter = one.adapter(imported, "cpu")
    try:
        differences = _differences(adapter)
    except Exception as error:
        return record | {"not_run": f"{type(error).__name__}: {_first_line(error)}"}
    report = run(CHECKS, adapter, {"initial_values": one.start} if one.start else {})
    statements = adapter.statements() if hasattr(adapter, "statements") else {}
    wrong = [words for words, holds in statements.items() if not holds]
    if wrong:
        raise AssertionError(f"{one.name}: not true: {'; '.join(wrong)}")
    return record | {
        "scheme": repr(adapter.scheme),
        "dtype": str(adapter.dtype),
        "norm_eps": adapter.norm_eps,
        **differences,
        "passed": report.passed,
        "failed": report.failed,
        "failed_as_expected": report.failed_as_expected,
        "not_checked": report.not_checked,
        "start": one.start,
        "instead": [*([one.instead] if one.instead else []), *statements],
    }


def _first_line(error: Exception) -> str:
    return textwrap.shorten(str(error).strip().split("\n")[0], 160, placeholder=" ...")


def _absent(one: Implementation) -> dict[str, Any]:
    files = [path for path in distribution(one.package).files or () if path.suffix == ".py"]
    hits = [str(path) for path in files if any(word in Path(path.locate()).read_text("utf-8") for word in one.absent)]
    if hits:
        raise AssertionError(f"{one.package} has {one.attribute} after all: {hits}")
    return {"not_run": f"none of its {len(files)} Python files has the words {' or '.join(one.absent)}"}


def _place(subject: Any) -> dict[str, Any]:
    """Return the file, from its package on, and the line of a class or function."""
    subject = inspect.unwrap(subject)
    path, line = Path(inspect.getsourcefile(subject)), inspect.getsourcelines(subject)[1]  # type: ignore[arg-type]
    folders = [Path(folder).resolve() for folder in sys.path if folder]
    root = max((folder for folder in folders if path.is_relative_to(folder)), key=lambda folder: len(folder.parts))
    return {"file": path.relative_to(root).as_posix(), "line": line}


def _differences(adapter: Adapter) -> dict[str, float]:
    """Return the largest differences, in parts of the largest entry.

    Of the results, of the results with parameters ten times as large, and of the sublayers' inputs.
    """
    pair = Pair(adapter)
    large = {name: 10 * value for name, value in pair.ours.items()}
    with torch.no_grad():
        runs = []
        for call in (pair.candidate, pair.reference):
            sublayers, inputs = recorded(pair.sublayers())
            results = [tree_leaves(call(ours, pair.state(), sublayers)) for ours in (pair.ours, large)]
            runs.append((*results, tree_leaves(inputs[: len(inputs) // 2])))
    kinds = ("of_results", "with_large_parameters", "of_inputs")
    names = [f"largest_difference_{kind}" for kind in kinds]
    return {
        name: max(((a - b).abs().max() / b.abs().max()).item() for a, b in zip(theirs, ours))
        for name, theirs, ours in zip(names, *runs)
    }


def executed(one: Implementation) -> SimpleNamespace:
    """Return the definitions of an implementation, executed without the imports of their files."""
    namespace: dict[str, Any] = {name: importlib.import_module(module) for name, module in MODULES.items()}
    namespace |= delta_adapters.STAND_INS
    for path, names in one.definitions.items():
        file = folder_of(one) / path
        tree = ast.parse(file.read_text(encoding="utf-8"))
        tree.body = [node for node in tree.body if getattr(node, "name", None) in names]
        code = compile(tree, str(file), "exec", flags=__future__.annotations.compiler_flag, dont_inherit=True)
        exec(code, namespace)
    return SimpleNamespace(**namespace)


MODULES = {
    "torch": "torch",
    "nn": "torch.nn",
    "F": "torch.nn.functional",
    "math": "math",
    "triton": "triton",
    "tl": "triton.language",
}
"""What the executed definitions call modules by."""


def folder_of(one: Implementation) -> Path:
    return CLONES / "@".join(filter(None, [one.package.replace("/", "+"), one.commit[:10]]))


def cloned(one: Implementation) -> Path:
    """Return the folder with the paths of a repository at its commit."""
    folder = folder_of(one)
    if folder.exists() and not (folder / ".git").exists():
        return folder
    if not folder.exists():
        clone = ["git", "clone", "--quiet", "--no-checkout", f"https://github.com/{one.package}", str(folder)]
        subprocess.run(clone, check=True)
    subprocess.run(
        ["git", "-C", str(folder), "checkout", "--quiet", one.commit, "--", *(one.paths or one.definitions)], check=True
    )
    return folder


def in_process(one: Implementation) -> dict[str, Any]:
    """Return the record of one implementation, checked in a process of its own."""
    path = [str(ROOT / "src"), str(ROOT)]
    if one.definitions:
        cloned(one)
    elif one.commit and not one.read:
        path.insert(0, str(cloned(one)))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **one.environment, "PYTHONPATH": os.pathsep.join(path)}
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.compliance", "--child", one.name]
    result = subprocess.run(command, env=environment, cwd=CLONES, capture_output=True, text=True, timeout=1800)
    if result.returncode:
        raise RuntimeError(f"{one.name}: {result.stderr[-2000:]}")
    return json.loads(result.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=[one.name for one in IMPLEMENTATIONS])
    parser.add_argument("--page", action="store_true", help="write the page from the records that exist")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        print(json.dumps(checked(next(one for one in IMPLEMENTATIONS if one.name == arguments.child))))
        return
    records = read()
    CLONES.mkdir(parents=True, exist_ok=True)
    for one in () if arguments.page else IMPLEMENTATIONS:
        if one.definitions and not one.commit and not folder_of(one).exists():
            print(f"{one.name}: left as it is; its file belongs into {folder_of(one)}")
        elif not arguments.only or one.name in arguments.only:
            records[one.name] = in_process(one)
            print(f"{one.name}: {verdict(records[one.name])}")
    order = [records[one.name] for one in IMPLEMENTATIONS if one.name in records]
    RECORDS.write_text("".join(json.dumps(record) + "\n" for record in order), encoding="utf-8")
    PAGE.write_text(page(order), encoding="utf-8")


def read() -> dict[str, dict[str, Any]]:
    lines = RECORDS.read_text(encoding="utf-8").splitlines() if RECORDS.exists() else []
    return {record["name"]: record for record in map(json.loads, lines)}


def verdict(record: Mapping[str, Any]) -> str:
    if "not_run" in record:
        return "not checked"
    if any(name in record["failed"] for name in COMPUTES):
        return "another scheme" if record["instead"] else "differs"
    return "right, with a limit" if record["failed"] else "right"


def place(record: Mapping[str, Any]) -> str:
    if "file" not in record:
        return f"`{record['attribute']}`"
    if "line" not in record:
        return f"`{record['attribute']}`, `{record['file']}`"
    return f"`{record['attribute']}`, `{record['file']}` line {record['line']}"


def in_words(record: Mapping[str, Any]) -> str:
    """Return what the record says, in sentences."""
    if "not_run" in record:
        return f"{record['not_run']}."
    words = [*record["instead"]]
    if "forward" in record["failed"]:
        words.append(f"the kit says: {record['failed']['forward']}")
    words += [LIMITS.get(name, reason) for name, reason in record["failed"].items() if name not in SHOWN]
    if "forward" not in record["failed"]:
        words += [order for scheme, order in ORDERS.items() if record["scheme"].startswith(scheme)]
    if record["largest_difference_with_large_parameters"] > 0.01 and not record["instead"]:
        gap = record["largest_difference_with_large_parameters"]
        words.append(f"with parameters ten times as large its results differ by {gap:.1g} of the largest entry")
    if record["start"]:
        words.append(f"a start of its own: {record['failed_as_expected']['initial_values']}")
    if not record["failed"]:
        reasons = {name: reason.split(": ")[0] for name, reason in record["not_checked"].items()}
        words += [f"`{name}` was not checked: {reason}" for name, reason in reasons.items()]
    gap = max(record["largest_difference_of_results"], record["largest_difference_of_inputs"])
    return "; ".join([*words, f"largest difference {gap:.1g} of the largest entry"]) + "."


ORDERS = {
    "ManifoldHyperConnections(order='columns'": "Sinkhorn divides by columns first, as equation 9 of mHC's paper",
    "ManifoldHyperConnections()": "Sinkhorn divides by rows first, where equation 9 of mHC's paper divides by columns",
    "DeepSeekHyperConnections(": "Sinkhorn divides by columns of its H_res first, as equation 9 of mHC's paper",
}
"""The order of Sinkhorn's iteration in those that agree with a scheme, by the beginning of the scheme in the record."""
LIMITS = {
    "float32_mappings": "under `torch.autocast` its mappings or its mixing are computed in bfloat16",
    "large_logits": "with parameters ten times as large values or gradients are not finite, where ours are",
}
SHOWN = (*COMPUTES, "initial_values")
"""Checks whose words stand elsewhere in a row."""


def page(records: list[dict[str, Any]]) -> str:
    rows = ["| implementation | version | our scheme | verdict | in words |", "|---|---|---|---|---|"]
    for record in records:
        version = record["version"][:10] if "/" in record["package"] else record["version"]
        if record.get("date"):
            version = f"{version} ({record['date']})".strip()
        cells = [f"{record['package']}: {place(record)}", version, f"`{record['preset']}`", verdict(record)]
        rows.append(f"| {' | '.join([*cells, in_words(record).replace('|', chr(92) + '|')])} |")
    about = sorted({(record["torch"], record["python"]) for record in records})
    specifications = sorted({record["specification"] for record in records})
    versions = "; ".join(f"torch {t}, Python {p}" for t, p in about)
    versions += f", specification {' and '.join(specifications)} of the kit"
    counts = Counter(verdict(record) for record in records)
    verdicts = "; ".join(f"{counts[name]} {name}" for name in VERDICTS if counts[name])
    return TEMPLATE.format(table="\n".join(rows), versions=versions, count=len(records), verdicts=verdicts)


VERDICTS = ("right", "right, with a limit", "another scheme", "differs", "not checked")


TEMPLATE = """\
# Which implementations are right?

Does a public implementation of Deep Delta Learning, hyper-connections, depth attention or AltUp compute the
equations of its paper, or of the released model? [The kit](testing.md) compared each with our scheme on a CPU, with
random parameters and streams that differ ({versions}).
Of {count} implementations: **{verdicts}**. The verdicts are explained [below](#what-the-verdicts-mean).
This page is generated from `experiments/compliance.jsonl`, which `python -m benchmarks.compliance` writes.

{table}

## What the verdicts mean

- **right**: results, inputs of the sublayers and all gradients agree to rounding, and no check of the kit fails.
- **right, with a limit**: the same, but a check about training fails. In float32 it is right,
  without autocast and with ordinary parameters.
- **another scheme**: it computes something else than the paper of our scheme. That may be what its authors wanted.
- **differs**: no known variant explains the difference.
- **not checked**: it does not run here, for the reason in its row. That says nothing about it, beyond the row.

"Right" means that it agrees with our scheme, which has [its own list of deviations](deviations.md) from the paper.
These are conventions and count as right: an eps inside its norms (the adapter takes it over), a layout of the streams,
another start, and float32 inside. An mHC is compared with our scheme in its own order of Sinkhorn's iteration
(`mhc:order=columns` is the paper's), which the kit finds, and its row says which one it follows. Speed is not
compared: see [other packages](speed.md#beside-other-packages).
Triton kernels ran in Triton's interpreter, which shows what they compute and nothing about a GPU. `torch.compile`
inside Megatron-LM was switched off. Of the files of Deep Delta Learning only the connection was executed, without the
model around it; what else the row says of a model was read. What a row says that one would need to be right was
computed too, and agreed with ours, except for parameter-golf's gate. The authors' current code, Dragon-LLM's and the
file without a repository were had as text of single files, not as a clone.

## Contest a row

Is a row wrong, or its version old? Each has an adapter in `benchmarks/adapters.py`, `benchmarks/delta_adapters.py` or
`benchmarks/compliance_adapters.py`, which says how the parameters correspond and how the module is called. Correct it,
run

```bash
python -m benchmarks.compliance --only tokenbender-mhc
```

(names are listed in `benchmarks/compliance.py`), and open an issue or a pull request with the adapter and the new
record. If the adapter misreads your code, the row is our mistake. To keep your code right,
[run the kit in your own CI](testing.md#in-your-ci).
"""


if __name__ == "__main__":
    main()
