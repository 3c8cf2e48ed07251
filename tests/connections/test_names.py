"""A name in any spelling, the field's names and ResBench's labels lead to the right preset."""

import re
import warnings
from pathlib import Path

import pytest

import residua
from residua.commands.schemes import schemes
from residua.connections import PRESETS, SCHEMES, describe, names, resolve
from residua.connections.names import ALIASES, canonical
from residua.connections.registry import name_of
from residua.lab.study.definition import load_study
from residua.lab.training import load_config


@pytest.mark.parametrize("preset", PRESETS)
def test_case_and_punctuation_do_not_matter(preset):
    for name in (preset.upper(), preset.replace("-", "_"), preset.replace("-", ""), preset.title()):
        assert canonical(name) == preset
        assert resolve(name) == residua.resolve({"preset": name}) == PRESETS[preset]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_class_and_its_name_in_files_resolve_to_its_first_preset(scheme):
    first = next(preset for preset, built in PRESETS.items() if type(built) is SCHEMES[scheme])
    assert canonical(scheme) == canonical(SCHEMES[scheme].__name__) == first
    assert resolve(SCHEMES[scheme].__name__) == PRESETS[first]


@pytest.mark.parametrize(
    ("name", "scheme"),
    [
        ("DDL", residua.DeepDelta()),
        ("Deep Delta Learning".replace(" ", "-"), residua.DeepDelta()),
        ("mHC", residua.ManifoldHyperConnections()),
        ("HyperConnections", residua.HyperConnections()),
        ("AttnRes", residua.AttentionResiduals()),
        ("ReZero", residua.Lambdas(r=None, z=None, p=0.0)),
        ("DeepNorm", residua.Lambdas(r=None, z=None, norm="post")),
        ("nanochat", residua.Lambdas(r=1.15, r_last=1.05, z=0.20, z_last=0.05, backout=0.2)),
        ("MUDDFormer", residua.MultiwayDynamicDense()),
        ("lambdas+tc:r=1.0", residua.Lambdas(r=1.0, z=0.20, z_last=0.05, backout=0.2, compress="token")),
        ({"preset": "ddl_write_only", "heads": 2}, residua.GatedDelta(erase="none", write="value", heads=2)),
    ],
)
def test_names_used_in_the_literature_are_understood(name, scheme):
    assert resolve(name) == scheme


@pytest.mark.parametrize(
    ("typed", "preset"),
    [
        ("DDL-TC w/o EC", "ddl-tc"),
        ("DDL-CC (w/o EC)", "ddl-cc"),
        ("ddl_tc without EC", "ddl-tc"),
        ("DDL-CC without EC", "ddl-cc"),
        ("DDL-TC-EC", "ddl-ec"),
        ("ddl-tc-ec", "ddl-ec"),
        ("DDL-EC", "ddl-ec"),
        ("DDL-CC-EC", "ddl-cc-ec"),
        ("ddl-tc", "ddl-tc"),
        ("ddl", "ddl"),
    ],
)
def test_unambiguous_names_of_the_paper_give_no_warning(typed, preset):
    names._tell_apart.cache_clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert canonical(typed) == preset
        assert resolve(typed) == PRESETS[preset]
        assert canonical(f"{typed}:beta_init=0.5") == f"{preset}:beta_init=0.5"


@pytest.mark.parametrize(
    ("typed", "ours", "theirs"),
    [
        ("DDL", "ddl", "ddl-cc-ec"),
        ("DDL-TC", "ddl-tc", "ddl-ec"),
        ("DDL_TC", "ddl-tc", "ddl-ec"),
        ("DDL-CC", "ddl-cc", "ddl-cc-ec"),
    ],
)
@pytest.mark.parametrize("lookup", [canonical, resolve, lambda name: residua.build(name, 8, 2)])
def test_a_name_that_means_another_preset_in_the_paper_gives_one_warning(typed, ours, theirs, lookup):
    names._tell_apart.cache_clear()
    with pytest.warns(UserWarning, match=f"preset {ours} .*preset {theirs}$") as raised:
        lookup(typed)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lookup(typed)
    assert len(raised) == 1
    assert "\n" not in str(raised[0].message)


def test_every_preset_of_the_paper_has_its_name_in_the_list_and_on_the_page():
    page = (Path(__file__).parents[2] / "docs" / "schemes.md").read_text("utf-8")
    listed = {record["name"]: record for record in schemes().value}
    for preset, titles in names.IN_THE_PAPER.items():
        (row,) = (line for line in page.splitlines() if line.startswith(f"| `{preset}` |"))
        assert all(f'"{title}"' in row for title in titles)
        assert listed[preset]["name_in_paper"] == ", ".join(titles)


def test_the_labels_of_resbench_are_the_connections_of_the_study():
    entries = load_study("resbench").schemes
    labels = names.ALIASES.keys() & entries.keys()
    assert len(labels) > 10
    for label in labels - {"residual+tc"}:
        assert resolve(label) == resolve(entries[label].connection), label
    plain = resolve(entries["residual+tc"].connection)  # the same numbers to the last bit, by another class
    assert (plain.erase, plain.compress, resolve("residual+tc").compress) == ("none", "token", "token")


def test_no_alias_is_the_name_of_a_preset():
    assert not {names.key(name) for name in names.ALIASES} & {names.key(name) for name in PRESETS}
    assert not names.ALIASES.keys() & residua.schemes().keys()


@pytest.mark.parametrize(
    ("typed", "written"),
    [
        ("ddl-cc", "ddl-cc"),
        ("ddl-cc:beta_init=0.5", "ddl-cc:beta_init=0.5"),
        ("DDL_CC:beta_init=0.5", "ddl-cc:beta_init=0.5"),
        ("lambdas:compress=token", "lambdas:compress=token"),
        ("Lambdas+TC", "lambdas:compress=token"),
        ("lambdas+tc:p=1.0", "lambdas:compress=token,p=1.0"),
        ("lambdas+tc:compress=null", "lambdas:compress=null"),
        ("mudd:sources=[0, 8],ways=vr", "mudd:sources=[0, 8],ways=vr"),
        ("gated-delta-4:value_channels=2,rank=2", "gated-delta:write_gate=true,value_channels=2,rank=2"),
    ],
)
def test_a_configuration_stores_the_canonical_name_of_a_preset(typed, written):
    """So the files and digests of a run do not depend on the spelling, and equal those of earlier versions."""
    assert load_config("tiny", [f"--model.connection={typed}"]).model.connection == written
    assert describe(resolve(typed)) == describe(resolve(written))


@pytest.mark.parametrize(
    ("name", "suggestion"),
    [
        ("deepdelt", "'ddl'"),
        ("Hyperconection", "'hc'"),
        ("lambda+tc", "'lambdas+tc'"),
        ("Canon", "'residual:compress=token'"),
        ("mch", "'mhc'"),
    ],
)
def test_a_misspelt_name_gets_a_suggestion(name, suggestion):
    for lookup in (canonical, resolve):
        with pytest.raises(ValueError, match=rf"no preset is called '{re.escape(name)}'; did you mean") as raised:
            lookup(name)
        assert str(raised.value).endswith(f"did you mean {suggestion}? (`residua schemes` lists all)")


def test_build_resolves_the_name_and_builds_the_scheme():
    stream = residua.build("mHC", dim=8, num_sublayers=2, norm_eps=1e-3)
    assert repr(stream.connections) == repr(PRESETS["mhc"].build(8, 2, norm_eps=1e-3).connections)
    assert residua.schemes()["mhc"] is PRESETS["mhc"]


@pytest.mark.parametrize("name", [*PRESETS, *ALIASES, "ddl-tc:value_channels=2", "lambdas+tc:compress_kernel=3"])
def test_a_scheme_is_named_by_its_nearest_preset_and_the_options_that_differ(name):
    found = name_of(resolve(name))
    assert resolve(found) == resolve(name)
    assert found.count("=") <= name.count("=")
