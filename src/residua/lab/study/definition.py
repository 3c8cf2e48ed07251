"""The definition of a study, as in its file: sizes, schemes, tuning budgets, seeds and questions."""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from residua.connections.names import canonical, today
from residua.errors import (
    Count,
    InputError,
    Natural,
    Range,
    check_types,
    decoded,
    did_you_mean,
    fits,
    mapping,
    require,
    shown,
)
from residua.files.reading import parse_yaml, read_text
from residua.lab.evaluation.comparable import Measurement, decides_measure
from residua.lab.records.folder import read_object
from residua.lab.training import load_config
from residua.lab.training.config import check_keys, typed_values

Measure = Literal["tokens", "FLOPs", "seconds", "compiled seconds"]
MEASURES: tuple[Measure, ...] = get_args(Measure)
BY_THE_STUDY = ("train.seed", "train.steps", "train.warmup_steps", "train.evaluate_every", "model.connection")
"""The keys of the configuration that a study sets itself."""
OWN_DATA = "data.further_validation"
"""The only key of the data that a size or a scheme may set: all runs of a study train on the same data."""


def _distinct(least: int, expected: str) -> Range:
    return Range(expected, lambda values: len(set(values)) == len(values) >= least)


def _are_numbers(values: Any) -> bool:
    numbers = isinstance(values, list | tuple) and all(fits(value, float) and 0 < value < math.inf for value in values)
    return numbers and bool(values)


def _are_pairs(pairs: Any) -> bool:
    def is_pair(pair: Any) -> bool:
        return fits(pair, list | tuple) and [*map(type, pair)] == [str, str] and pair[0] != pair[1]

    listed = fits(pairs, list | tuple) and all(map(is_pair, pairs))
    return listed and len({frozenset(pair) for pair in pairs}) == len(pairs)


NATURALS = Range(f"whole numbers from 0 to {2**63 - 1}", lambda seeds: all(0 <= seed < 2**63 for seed in seeds))
Seeds = Annotated[tuple[int, ...], NATURALS, _distinct(2, "at least 2 different ones")]
Factors = Annotated[
    tuple[float, ...],
    Range("a list of numbers above 1, 1e6 at most", lambda factors: all(1 < x <= 1e6 for x in factors)),
]
Tokens = Annotated[float, Range("a positive number, 1e9 at most", lambda tokens: 0 < tokens <= 1e9)]
Over = Annotated[
    Mapping[str, Sequence[Any]],
    Range("values for at least one key", bool),
    Range("a list of numbers above 0 for each key", lambda over: all(map(_are_numbers, over.values()))),
]


@dataclass(frozen=True)
class Entry:
    """One scheme of a study.

    connection      a preset's name, with options if wanted: "residual:expand=conv"; by default the name of the entry
    keys            keys of the configuration that are set only for this scheme
    parameters_of   another scheme of the study; the MLPs of this entry get the width that brings its number of
                    parameters closest to that of the other scheme
    """

    name: str
    connection: str
    keys: Mapping[str, Any] = field(default_factory=dict)
    parameters_of: str | None = None

    def __post_init__(self) -> None:
        check_types(self)
        object.__setattr__(self, "connection", today(self.connection))


@dataclass(frozen=True)
class Size:
    """One size of a study.

    keys                   keys of the configuration that are set only for this size
    tuned                  another size, from which this size takes its tuned settings; None for its own search
    over                   with `tuned`: keys and values of a further search at this size, which starts from the
                           settings of the size `tuned` and trains every point in full
    longer                 overrides `Study.longer`; without longer runs, schemes are compared only at equal tokens
    tokens_per_parameter   overrides `Study.tokens_per_parameter`
    seeds                  some of the study's seeds, for a size with long runs; questions then add no seeds
    noise                  "pooled": one standard deviation over seeds for all schemes; "own": one for each scheme,
                           because some runs may go through a transition and others not
    """

    name: str
    keys: Mapping[str, Any]
    tuned: str | None = None
    longer: Factors | None = None
    over: Over | None = None
    tokens_per_parameter: Tokens | None = None
    seeds: Seeds | None = None
    noise: Literal["pooled", "own"] = "pooled"

    def __post_init__(self) -> None:
        check_types(self)
        require(self.over is None or self.tuned is not None, "tuned", "a size, as `over` is given", None)


@dataclass(frozen=True)
class Tuning:
    """The tuning budget of every scheme, which the report states.

    over             the tuned keys, and the values of each in the grid, with which the search begins
    runs             the largest number of points per scheme; the search moves from the best point to its neighbours
    baseline_runs    the largest number of points per baseline
    factors          the factor between a point and its neighbours, by key; 2 for all other keys
    length           the length of a tuning run, as a fraction of a reported run
    finalists        the number of best points that are then trained in full, because short runs favour high learning
                     rates; with 1 the best point of the search is reported
    seed             the seed of the search; no reported run has it
    final_seeds      the seeds with which every finalist is trained, because one seed cannot separate close points; the
                     finalist with the lowest mean loss wins. No reported run has these seeds. If empty, only `seed`
    rule             "one seed": tuning uses only `seed`. "all seeds": every point is trained in full with the seeds of
                     the study. The best point has the lowest mean loss on labels that do not repeat, because this loss
                     does not jump when a run learns to copy. The report shows all points, and how many runs copy
    """

    over: Over
    runs: int
    baseline_runs: int
    factors: Annotated[
        Mapping[str, float],
        Range("a number above 1 for each key", lambda factors: all(fits(x, float) and x > 1 for x in factors.values())),
    ] = field(default_factory=dict)
    length: Annotated[float, Range("a number above 0, 1 at most", lambda length: 0 < length <= 1)] = 1.0
    finalists: int = 1
    seed: Natural = 0
    final_seeds: Annotated[tuple[int, ...], NATURALS, _distinct(0, "each seed once")] = ()
    rule: Literal["one seed", "all seeds"] = "one seed"

    @property
    def finalist_seeds(self) -> tuple[int, ...]:
        return self.final_seeds or (self.seed,)

    @property
    def every(self) -> bool:
        """Whether every point is trained with all seeds of the study."""
        return self.rule == "all seeds"

    @property
    def own_seeds(self) -> set[int]:
        """The seeds that are used for tuning; no reported run may have them."""
        return set() if self.every else {self.seed, *self.finalist_seeds}

    def __post_init__(self) -> None:
        check_types(self)
        grid = math.prod(len(values) for values in self.over.values())
        require(self.runs >= grid, "runs", f"at least the {grid} points of the grid", self.runs)
        require(self.baseline_runs >= self.runs, "baseline_runs", "at least tuning.runs", self.baseline_runs)
        most = 1 if self.length == 1 else self.runs
        why = "1, as tuning runs are as long as reported ones" if self.length == 1 else "1 to tuning.runs"
        require(1 <= self.finalists <= most, "finalists", why, self.finalists)
        if self.every:
            require(self.length == 1, "length", "1 with rule: all seeds", self.length)
            require(not self.final_seeds, "final_seeds", "empty with rule: all seeds", self.final_seeds)


@dataclass(frozen=True)
class Question:
    """One question. A study answers it with a difference for every comparison at every size.

    ask       the question in words
    compare   pairs of schemes: the loss of the first minus the loss of the second
    at        the measures at which they are compared: equal "tokens", "FLOPs", "seconds" or "compiled seconds" (of a
              step through `torch.compile`). Except for tokens, the second scheme of each pair must be a baseline
    seeds     further seeds for the compared schemes, in addition to the study's; only at equal tokens
    """

    name: str
    ask: str
    compare: Annotated[
        tuple[tuple[str, str], ...],
        Range("at least one pair of schemes", bool),
        Range("pairs of two different schemes", lambda pairs: all(first != second for first, second in pairs)),
    ]
    at: Annotated[tuple[Measure, ...], Range(f"some of {', '.join(MEASURES)}", bool)] = ("tokens",)
    seeds: Annotated[tuple[int, ...], NATURALS, _distinct(0, "different integers")] = ()

    def __post_init__(self) -> None:
        check_types(self)
        reason = "tokens, as longer runs of the baselines have no further seeds"
        require(not self.seeds or self.at == ("tokens",), "at", reason, self.at)

    @property
    def schemes(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name for pair in self.compare for name in pair))


@dataclass(frozen=True)
class Study:
    """The definition of a study.

    title                  the name of the study, in words
    config                 the recipe or YAML file of `residua train` for all runs, or several
    set                    keys of the configuration that override `config`, for all runs
    tokens_per_parameter   the tokens of every run, per parameter of the first baseline at the size of the run
    epochs                 the largest number of times that a run may see the data
    sizes                  the sizes by name, in the order of the runs
    schemes                the schemes by name, in the order of the runs
    baselines              the schemes that the others are compared with; the first one sets the tokens and the ratios
    tuning                 the budget of the search for each scheme
    seeds                  the seeds of the reported runs; only `rule: all seeds` uses them for tuning
    longer                 lengths of further runs of the baselines, as multiples of the reported length, for the
                           comparison at equal FLOPs and seconds
    warmup                 the warmup as a fraction of the steps
    evaluations            the number of points in a learning curve
    questions              the questions that the study answers, by name
    primary                the contrasts at equal tokens that are named before their runs: pairs of schemes by size.
                           p-values are corrected for the number of these contrasts; all other results are descriptive

    Raises:
        InputError: a value cannot be used.
    """

    title: str
    sizes: Annotated[Mapping[str, Size], Range("at least one", bool)]
    schemes: Mapping[str, Entry]
    tuning: Tuning
    config: str | tuple[str, ...] = "tiny"
    set: Mapping[str, Any] = field(default_factory=dict)
    tokens_per_parameter: Tokens = 20.0
    epochs: Count = 1
    baselines: Annotated[tuple[str, ...], _distinct(1, "at least one, each once")] = ("residual",)
    seeds: Seeds = (1, 2, 3, 4, 5)
    longer: Factors = ()
    warmup: Annotated[float, Range("a number from 0, below 1", lambda share: 0 <= share < 1)] = 0.1
    evaluations: Count = 10
    questions: Mapping[str, Question] = field(default_factory=dict)
    primary: Annotated[
        Mapping[str, Sequence[Sequence[str]]],
        Range(
            "a list of pairs of two schemes for each size, each pair once, such as [[ddl, residual]]",
            lambda sizes: all(map(_are_pairs, sizes.values())),
        ),
    ] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_types(self)
        check_names("baselines", self.baselines, self.schemes)
        unmatched = [name for name, entry in self.schemes.items() if entry.parameters_of is None]
        for name, entry in self.schemes.items():
            check_names(f"schemes.{name}.parameters_of", filter(None, [entry.parameters_of]), unmatched)
        self._check_questions()
        for size in self.sizes.values():
            self._check_size(size)
        parts = (*self.schemes.values(), *self.sizes.values())
        for key in [*self.set, *(key for part in parts for key in part.keys), *self.tuning.over]:
            require(key not in BY_THE_STUDY, key, "a key that a study does not set itself", key)
        for part in parts:
            place = f"{'schemes' if isinstance(part, Entry) else 'sizes'}.{part.name}"
            for key, value in part.keys.items():
                own = not key.startswith("data.") or key == OWN_DATA
                require(own, f"{place}: {key}", "left out, because all runs train on the study's data", value)

    def _check_questions(self) -> None:
        tuners = self.tuning.own_seeds
        listed = f"those that tune ({', '.join(map(str, sorted(tuners)))})"
        require(not tuners & {*self.seeds}, "seeds", f"different from {listed}", self.seeds)
        for name, question in self.questions.items():
            new = not {*self.seeds, *tuners} & {*question.seeds}
            require(new, f"questions.{name}.seeds", f"different from the study's and {listed}", question.seeds)
            second = next((pair[1] for pair in question.compare if pair[1] not in self.baselines), None)
            reason = f"tokens, as {second} is not a baseline and is trained for one length"
            require(second is None or question.at == ("tokens",), f"questions.{name}.at", reason, question.at)

    def _check_size(self, size: Size) -> None:
        place, again = f"sizes.{size.name}", size.over is not None
        check_names(f"{place}.seeds", size.seeds, self.seeds)
        sizes = [name for name, r in self.sizes.items() if r.tuned is None or (r.over is not None and not again)]
        expected = f"a size with a search of its own ({', '.join(sizes) or 'none is there'})"
        require(size.tuned in (None, *sizes), f"{place}.tuned", expected, size.tuned)
        check_names(f"{place}.over", size.over, self.tuning.over)
        self.tuning_at(size.name)  # checks the budget

    def longer_at(self, size: str) -> Sequence[float]:
        """Return the lengths of further runs of the baselines at a size, as multiples of the reported length."""
        longer = self.sizes[size].longer
        return self.longer if longer is None else longer

    def tokens_at(self, size: str) -> float:
        """Return the tokens per parameter of the runs at a size."""
        return self.sizes[size].tokens_per_parameter or self.tokens_per_parameter

    def seeds_at(self, size: str) -> Sequence[int]:
        """Return the seeds of the reported runs at a size."""
        return self.sizes[size].seeds or self.seeds

    def measure_at(self, size: str, scheme: str) -> Measurement:
        """Return how losses of a scheme at a size are measured, as far as the study's file determines it."""
        keys = self.keys_at(size, scheme)
        return Measurement.of({key: value for key, value in keys.items() if decides_measure(key)}, {})

    def keys_at(self, size: str, scheme: str) -> dict[str, Any]:
        """Return the keys of the configuration that the study's file sets for a scheme at a size."""
        entry = self.schemes[scheme]
        return {**self.set, **self.sizes[size].keys, **entry.keys, "model.connection": entry.connection}

    def searches(self, size: str) -> list[str]:
        """Return the sizes of the searches behind a size's settings; each search starts from the previous result."""
        tuned, over = self.sizes[size].tuned, self.sizes[size].over
        before = [] if tuned is None else self.searches(tuned)
        return [*before, size] if tuned is None or over is not None else before

    def tuning_at(self, size: str) -> Tuning:
        """Return the budget of each scheme's search at a size."""
        over = self.sizes[size].over
        return self.tuning if over is None else replace(self.tuning, over=over, length=1.0, finalists=1, final_seeds=())

    def budget(self, scheme: str) -> int:
        """Return the largest number of points in a search of a scheme."""
        return self.tuning.baseline_runs if scheme in self.baselines else self.tuning.runs

    def further_seeds(self, size: str, scheme: str) -> list[int]:
        """Return the seeds of a scheme that only questions add, from questions whose schemes are all in the study.

        Empty at a size with its own seeds.
        """
        if self.sizes[size].seeds is not None:
            return []
        asked = [q for q in self.questions.values() if scheme in q.schemes and set(q.schemes) <= self.schemes.keys()]
        return sorted({seed for question in asked for seed in question.seeds})

    def data(self, path: str | None) -> str:
        """Return the folder of the data: `path`, or that of the configuration. Raises InputError if both are None."""
        folder = path or load_config(self.config, self.set).data.path
        require(folder is not None, "--data", "a folder that residua prepare made", None)
        return folder

    def only(self, schemes: Sequence[str] | None = None, sizes: Sequence[str] | None = None) -> "Study":
        """Return a copy of this study that is limited to `schemes` and `sizes`; None keeps all.

        The baselines stay, as do the schemes and sizes on which the chosen ones depend. A scheme that is missing in
        the file, such as a registered scheme, is added under its name. Raises InputError for an unknown size.
        """
        check_names("--sizes", sizes, self.sizes)
        chosen = self.schemes
        if schemes is not None:
            plain = {entry.connection: name for name, entry in chosen.items() if entry == Entry(name, entry.connection)}
            schemes = [name if name in chosen else plain.get(canonical(name), name) for name in schemes]  # any spelling
            matched = {chosen[name].parameters_of for name in schemes if name in chosen}
            wanted = {*self.baselines, *schemes, *matched}
            joining = {name: Entry(name, canonical(name)) for name in schemes if name not in chosen}
            chosen = {name: entry for name, entry in chosen.items() if name in wanted} | joining
        needed = {size for name in sizes or self.sizes for size in (name, *self.searches(name))}
        return replace(self, schemes=chosen, sizes={name: size for name, size in self.sizes.items() if name in needed})


def load_study(source: str) -> Study:
    """Read a study: "resbench", or a YAML file.

    Raises:
        InputError: the file does not exist, or has an invalid key or value.
    """
    if source == "resbench":
        text = (resources.files("residua.lab.study") / "resbench.yaml").read_text(encoding="utf-8")
    elif Path(source).is_file():
        text = read_text(source, "YAML")
    else:
        files = [str(path) for path in Path(source).parent.glob("*.y*ml")]
        nearest = did_you_mean(source, ["resbench", *files])
        raise InputError(f"the study must be resbench or a YAML file, found no file {source!r}{nearest}")
    study = read_study(parse_yaml(text, source), source)
    # Names are checked only here, because a report of a folder must not need the packages that define the schemes.
    try:
        return _checked(study)
    except InputError as error:
        raise InputError(f"{source}: {error}") from error


def _checked(study: Study) -> Study:
    """Return the study with canonical names of presets. Raises InputError for a name or key that does not exist."""
    check_keys(study.tuning.over, "tuning.over")
    tuned = {*study.tuning.over}.union(*(size.over or () for size in study.sizes.values()))
    check_names("tuning.factors", study.tuning.factors, sorted(tuned))
    for place, keys in {
        "set": study.set,
        **{f"sizes.{name}": size.keys for name, size in study.sizes.items()},
        **{f"schemes.{name}": entry.keys for name, entry in study.schemes.items()},
    }.items():
        typed_values(keys, place)
        for key in filter(study.tuning.over.__contains__, keys):
            raise InputError(f"{place} must not set {key}, which tuning.over tunes, got {shown(keys[key])}")
    entries = {}
    for name, entry in study.schemes.items():
        try:
            entries[name] = replace(entry, connection=canonical(entry.connection))
        except InputError as error:
            raise InputError(f"schemes.{name}: {str(error).removeprefix('connection: ')}") from error
    for name, question in study.questions.items():
        check_names(f"questions.{name}.compare", question.schemes, entries)
    check_names("primary", study.primary, study.sizes)
    for size, pairs in study.primary.items():
        check_names(f"primary.{size}", itertools.chain(*pairs), entries)
    return replace(study, schemes=entries)


def read_folder(out: Path) -> Study:
    """Return the study in a folder. Raises InputError if there is none."""
    path = out / "study.json"
    if not path.is_file():
        raise InputError(
            f"{out} must be the folder of a study, found no study.json; residua study run FILE --out DIR makes one"
        )
    return read_study(read_object(path), str(path))


def check_names(place: str, names: Iterable[Any] | None, choices: Iterable[Any]) -> None:
    """Raise InputError for the first of `names` that is not among the choices."""
    choices = [*choices]
    for name in names or ():
        if name not in choices:
            listed = [*map(str, choices)]
            some = f"some of {', '.join(listed) or 'none'}"
            raise InputError(f"{place} must be {some}, got {shown(name)}{did_you_mean(name, listed)}")


def read_study(document: Any, source: str) -> Study:
    """Return the study in a document: a study file, or the study.json of a folder, where each part has its `keys`."""
    sections: dict[str, type] = {"sizes": Size, "schemes": Entry, "questions": Question}
    values = dict(mapping(document, source))
    try:
        for section, kind in sections.items():
            if section in values:
                parts = mapping(values[section] or {}, section)
                values[section] = {name: _part(name, part, kind, section) for name, part in parts.items()}
        if "tuning" in values:
            values["tuning"] = decoded(values["tuning"], Tuning, "tuning")
        return decoded(values, Study)
    except InputError as error:
        raise InputError(f"{source}: {error}") from error


def _part(name: str, document: Any, kind: type, section: str) -> Any:
    """Return a size, a scheme or a question from a document. Keys with a dot are keys of the configuration."""
    where = f"{section}.{name}"
    values = {**mapping({} if document is None else document, where), "name": name}
    if kind is not Question:
        keys = {key: values.pop(key) for key in list(values) if "." in key}
        values["keys"] = {**mapping(values.get("keys") or {}, f"{where}.keys"), **keys}
    if kind is Entry:
        values.setdefault("connection", name)
    return decoded(values, kind, where)
