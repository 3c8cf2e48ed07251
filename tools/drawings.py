"""Draw the pictures of the pages that are line drawings, docs/NAME.svg: they have a light and a dark look.

python tools/drawings.py
"""

import csv
import json
import math
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[1]
DOCS, RECORDS = ROOT / "docs", ROOT / "experiments"
WIDTH = 640
TEXT = 16
"""The height of the text of a page, in pixels: no text of a drawing is shown larger."""
LIGHT = "--ink:#1b1f24;--soft:#5f6771;--fill:#f1f4f6;--one:#00796b;--two:#c2410c;--three:#6d28d9"
DARK = "--ink:#e6e8eb;--soft:#a0a8b2;--fill:#2a2f3a;--one:#4db6ac;--two:#fb923c;--three:#c4b5fd"
INK, SOFT, ONE, TWO, THREE = ("ink", "soft", "one", "two", "three")


def picture(height: int, *parts: str, size: int = 19) -> str:
    """Return an SVG with these elements; its colours are variables, so that a page can set them.

    `size`: of the largest text, in units of the drawing.
    """
    heads = "".join(
        f'<marker id="to-{colour}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        f'<path d="M0 0L8 4L0 8z" fill="var(--{colour})"/></marker>'
        for colour in (INK, SOFT, ONE, TWO, THREE)
    )
    style = f".figure{{{LIGHT}}}@media(prefers-color-scheme:dark){{.figure{{{DARK}}}}}"
    return (
        f'<svg class="figure" xmlns="http://www.w3.org/2000/svg" width="{WIDTH * TEXT // size}" '
        f'viewBox="0 0 {WIDTH} {height}" font-family="system-ui,sans-serif" font-size="19" fill="var(--ink)">'
        f"<style>{style}</style><defs>{heads}</defs>{''.join(parts)}</svg>\n"
    )


def text(x: float, y: float, words: str, colour: str = INK, anchor: str = "middle", size: int = 19) -> str:
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" font-size="{size}" fill="var(--{colour})">{words}</text>'


def below(words: str) -> str:
    """A subscript, within the words of a text."""
    return f'<tspan font-size="13" dy="5">{words}</tspan><tspan dy="-5"> </tspan>'


def line(*points: tuple[float, float], colour: str = INK, width: float = 2, arrow: bool = True, dash: str = "") -> str:
    path = " ".join(f"{x:.5g},{y:.5g}" for x, y in points)
    head = f' marker-end="url(#to-{colour})"' if arrow else ""
    dashes = f' stroke-dasharray="{dash}"' if dash else ""
    stroke = f'stroke="var(--{colour})" stroke-width="{width:g}"{dashes}{head}'
    return f'<polyline points="{path}" fill="none" {stroke}/>'


def box(
    x: float, y: float, words: str, width: float = 96, height: float = 42, colour: str = INK, size: int = 19
) -> str:
    """A box around a centre."""
    return (
        f'<rect x="{x - width / 2:g}" y="{y - height / 2:g}" width="{width:g}" height="{height:g}" rx="7" '
        f'fill="var(--fill)" stroke="var(--{colour})" stroke-width="1.5"/>' + text(x, y + 6.5, words, colour, size=size)
    )


def dot(x: float, y: float, words: str = "+", colour: str = INK) -> str:
    circle = f'<circle cx="{x:g}" cy="{y:g}" r="15" fill="var(--fill)" stroke="var(--{colour})" stroke-width="1.5"/>'
    return circle + text(x, y + 6.5, words, colour)


def connection() -> str:
    """The two calls around a sublayer: read gives its input, write takes its output, a carry goes between them."""
    lanes = [
        line((x, y), (end, y), colour=ONE, arrow=False)
        for x, end in ((20, 110), (232, 408), (532, 604))
        for y in (176, 186, 196, 206)
    ]
    return picture(
        262,
        *lanes,
        '<path d="M604 168L628 191L604 214z" fill="var(--one)"/>',
        text(20, 160, "state X", ONE, "start"),
        line((170, 153), (170, 48), (233, 48)),
        text(184, 112, "x, normalised", INK, "start", 17),
        box(320, 48, "attention or MLP", 174, 52),
        line((407, 48), (470, 48), (470, 151)),
        text(484, 112, "y", INK, "start"),
        line((230, 228), (410, 228), colour=SOFT, dash="5 4"),
        text(320, 254, "carry: X, gates", SOFT, size=17),
        box(171, 191, "read", 122, 74, ONE),
        box(470, 191, "write", 124, 74, ONE),
    )


def scales() -> str:
    """One stream from left to right; three learned numbers beside the plain residual."""
    return picture(
        210,
        text(26, 77, "x"),
        line((44, 70), (116, 70)),
        dot(132, 70, "r", ONE),
        line((147, 70), (216, 70)),
        dot(232, 70),
        line((247, 70), (520, 70)),
        dot(537, 70),
        line((552, 70), (594, 70)),
        text(614, 77, "x′"),
        text(26, 147, "x₀"),
        line((48, 140), (116, 140), colour=SOFT),
        dot(132, 140, "z", ONE),
        line((147, 140), (232, 140), (232, 88)),
        line((290, 70), (290, 140), (318, 140)),
        box(376, 140, "norm, F", 112),
        line((432, 140), (468, 140)),
        dot(484, 140, "p", ONE),
        line((499, 140), (537, 140), (537, 88)),
        text(320, 28, "x′ = r x + z x₀ + p F(norm(r x + z x₀))", ONE),
        text(320, 197, "r = 1, z = 0 and p = 1 give the plain residual", SOFT, size=17),
    )


def delta(equation: bool = False) -> str:
    """Three gates of one delta write: what the state holds along k moves to the value v, or beyond it.

    `equation`: with the equation below and larger text, for a page that phones show first.
    """
    parts = [text(320, 272, "x′ = x + β k (v − kᵀx)", INK, size=24)] if equation else []
    size, small = (24, 21) if equation else (19, 17)
    k, v, x = (math.cos(0.35), math.sin(0.35)), 1.3, (-1.0, 0.9)
    along = k[0] * x[0] + k[1] * x[1]
    for number, gate in enumerate((0, 1, 2)):
        left, ground, unit = 68 + 205 * number, 170, 46
        after = tuple(x[i] + gate * k[i] * (v - along) for i in range(2))

        def at(point: tuple[float, float], left: float = left, ground: float = ground, unit: float = unit):
            return left + unit * point[0], ground - unit * point[1]

        aim = (v * k[0] - 1.9 * k[1], v * k[1] + 1.9 * k[0]), (v * k[0] + 0.9 * k[1], v * k[1] - 0.9 * k[0])
        parts += [
            line(at((-1.2 * k[0], -1.2 * k[1])), at((2.4 * k[0], 2.4 * k[1])), colour=SOFT, width=1, arrow=False),
            line(*map(at, aim), colour=THREE, width=1.5, arrow=False, dash="5 4"),
            line(at(x), at(after), colour=TWO, width=2, arrow=bool(gate), dash="3 3"),
            line(at((0, 0)), at(x)),
            line(at((0, 0)), at(k), colour=THREE),
            *([line(at((0, 0)), at(after), colour=ONE, width=3)] if gate else []),
            text(at(x)[0] - 10, at(x)[1] - 8, "x", size=size),
            text(at(k)[0] - 21, at(k)[1] + 38, "k", THREE, size=size),
            *([text(at(after)[0] + 10, at(after)[1] - 2, "x′", ONE, "start", size)] if gate else []),
            text(left + 36, 24, f"β = {gate}: {('keeps', 'replaces', 'reflects')[gate]}", ONE, size=size),
            text(at(aim[1])[0] + 14, at(aim[1])[1] + 24, "kᵀx = v", THREE, size=small),
        ]
    return picture(288 if equation else 242, *parts, size=size)


def icon() -> str:
    """The mark of the site: a stream that goes on, and a sublayer that reads and writes."""
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 32 32"><rect width="32" height="32" rx="7" '
        'fill="#00796b"/><path d="M4 21H28M9 21V9H23V21" fill="none" stroke="#fff" stroke-width="3" '
        'stroke-linejoin="round" stroke-linecap="round"/></svg>\n'
    )


def streams() -> str:
    """Four lanes: read with h_pre, mixed by h_res, written with h_post."""
    lanes = (46, 88, 130, 172)
    parts = []
    for number, y in enumerate(lanes):
        weight = (3.5, 1.5, 1, 2)[number]
        parts += [
            text(30, y + 6, f"X{'₁₂₃₄'[number]}"),
            line((50, y), (236, y), arrow=False),
            line((112, y), (150, 222), colour=ONE, width=weight, arrow=False),
            *(
                line((236, y), (376, other), colour=TWO, width=2.4 if y == other else 0.8, arrow=False)
                for other in lanes
            ),
            line((376, y), (600, y)),
            line((476, 222), (514, y), colour=THREE, width=(1, 3.5, 2, 1)[number], arrow=False),
        ]
    parts += [
        line((150, 222), (252, 222), colour=ONE),
        box(313, 222, "norm, F", 116),
        line((371, 222), (476, 222), colour=THREE, arrow=False),
        text(92, 228, f"h{below('pre')} reads", ONE),
        text(306, 24, f"h{below('res')} mixes", TWO),
        text(556, 228, f"h{below('post')} writes", THREE),
    ]
    return picture(252, *parts)


def rotations() -> str:
    """A state on a circle: turned by Q, mirrored by H, and blended between the two, which is shorter."""
    centre, radius = (170, 150), 112

    def at(angle: float, length: float = 1) -> tuple[float, float]:
        return centre[0] + radius * length * math.cos(angle), centre[1] - radius * length * math.sin(angle)

    start, turned, mirrored, share = 0.5, 1.2, 3.2, 0.5
    blend = tuple(share * a + (1 - share) * b for a, b in zip(at(turned), at(mirrored)))
    circle = f'<circle cx="{centre[0]}" cy="{centre[1]}" r="{radius}" fill="none" stroke="var(--soft)"/>'
    return picture(
        300,
        circle,
        line(at((start + mirrored) / 2, 1.22), at((start + mirrored) / 2, -1.22), colour=SOFT, arrow=False, dash="5 4"),
        line(at(turned), at(mirrored), colour=SOFT, arrow=False, width=1),
        line(centre, at(start)),
        line(centre, at(turned), colour=ONE, width=3),
        line(centre, at(mirrored), colour=TWO, width=3),
        line(centre, blend, colour=THREE, width=3),
        text(*at(start, 1.13), "x"),
        text(at(turned)[0] + 20, at(turned)[1] - 8, "Q x", ONE),
        text(at(mirrored)[0] - 24, at(mirrored)[1] + 2, "H x", TWO),
        text(330, 84, "Q x: turned, as long as before", ONE, "start", 17),
        text(330, 118, "H x: mirrored, as long as before", TWO, "start", 17),
        text(330, 152, "a blend of both is shorter", THREE, "start", 17),
        text(330, 214, "JPmHC turns the streams.", SOFT, "start", 17),
        text(330, 240, "EDelta has a gate between Q and H.", SOFT, "start", 17),
    )


def depth() -> str:
    """The next sublayer reads a weighted average of every earlier output."""
    parts = []
    for number, weight in enumerate((0.3, 0.08, 0.17, 0.45)):
        x = 60 + 114 * number
        parts += [
            line((x, 75), (x, 112), (520, 170), colour=ONE, width=1 + 9 * weight, arrow=False),
            box(x, 54, ("embedding", "output 1", "output 2", "output 3")[number], 106, size=17),
            text(x - 6, 102, f"{weight:.2f}", ONE, "end", 17),
        ]
    parts += [
        dot(520, 170, "Σ", ONE),
        line((520, 186), (520, 206)),
        box(520, 228, "norm, F", 112),
        line((576, 228), (592, 228), (592, 82)),
        box(578, 60, "output 4", 100, size=17),
        text(220, 214, "the weights sum to 1 and are", SOFT, size=17),
        text(220, 238, "computed anew for every token", SOFT, size=17),
    ]
    return picture(262, *parts)


def update() -> str:
    """The update h of a sublayer, and the part of it along the state."""
    origin, unit = (110, 196), 62

    def at(point: tuple[float, float]) -> tuple[float, float]:
        return origin[0] + unit * point[0], origin[1] - unit * point[1]

    x, h = (2.0, 0.5), (0.9, 1.6)
    share = (h[0] * x[0] + h[1] * x[1]) / (x[0] ** 2 + x[1] ** 2)
    along = (share * x[0], share * x[1])
    whole, rest = (x[0] + h[0], x[1] + h[1]), (x[0] + h[0] - along[0], x[1] + h[1] - along[1])
    return picture(
        250,
        line(at((0, 0)), at((1.9 * x[0], 1.9 * x[1])), colour=SOFT, width=1, arrow=False),
        line(at((0, 0)), at(x)),
        line(at(x), at(whole), colour=THREE),
        line(at(whole), at(rest), colour=TWO, dash="4 3"),
        line(at((0, 0)), at(rest), colour=ONE, width=3),
        text(at(x)[0] - 20, at(x)[1] + 28, "x"),
        text(at(whole)[0] + 14, at(whole)[1] + 4, "x + h", THREE, "start"),
        text(at(rest)[0] - 6, at(rest)[1] - 10, "x′", ONE),
        text(352, 150, "dashed: the part of h along x,", TWO, "start", 17),
        text(352, 174, "which a gate e removes", TWO, "start", 17),
        text(352, 212, "x′: the new state for e = 1", ONE, "start", 17),
    )


def records(name: str) -> list[dict]:
    return [json.loads(line) for line in (RECORDS / name).read_text(encoding="utf-8").splitlines()]


def flow(*steps: tuple[str, str], under: str = "") -> str:
    """Boxes from left to right with a word below each."""
    gap = WIDTH / len(steps)
    parts = [text(320, 128, under, SOFT, size=17)] if under else []
    for number, (name, words) in enumerate(steps):
        x = gap * (number + 0.5)
        parts += [box(x, 40, name, gap - 34, size=17, colour=ONE), text(x, 86, words, SOFT, size=17)]
        if number:
            parts.append(line((x - gap / 2 - 17, 40), (x - gap / 2 + 17, 40)))
    return picture(142 if under else 102, *parts)


def more(title: str, ratios: dict[str, dict[str, float]]) -> str:
    """What each takes more than its baseline, in percent, as bars, with the quartiles over rounds."""
    rows = sorted(ratios.items(), key=lambda row: row[1]["median"])
    scale = 300 / (rows[-1][1]["upper"] - 1)
    parts = [text(320, 24, title, INK, size=17)]
    for number, (preset, ratio) in enumerate(rows):
        y = 56 + 27 * number
        low, middle, high = (208 + max(1, scale * (ratio[part] - 1)) for part in ("lower", "median", "upper"))
        parts += [
            text(196, y + 6, preset, INK, "end", 17),
            f'<rect x="208" y="{y - 9}" width="{middle - 208:.1f}" height="18" rx="3" fill="var(--one)"/>',
            line((low, y), (high, y), colour=INK, width=1.5, arrow=False),
            text(high + 8, y + 6, f"{100 * (ratio['median'] - 1):+.0f} %", SOFT, "start", 17),
        ]
    return picture(56 + 27 * len(rows), *parts)


def training_time() -> str:
    rows = [row for row in records("bench-steps.jsonl") if not row["train"]["compile"] and ":" not in row["scheme"]]
    times = {row["scheme"]: row["time_ratio"] for row in rows}
    return more("extra time of a training step beyond the plain residual's", times)


def token_time() -> str:
    times = {row["preset"]: row["ratio"] for row in records("bench-generate-converted.jsonl")}
    return more("extra time per token beyond the unconverted Llama's", times)


def learning_rates() -> str:
    """The demo's sweep: the best loss of each scheme at each learning rate, over the other settings."""
    found = defaultdict(lambda: defaultdict(list))
    for run in records("tune-tiny.jsonl"):
        if run["seed"] == 0:
            found[run["scheme"]][run["lr"]].append(run["val_loss"])
    low, high = 3.8, 4.5
    parts = [text(320, 22, "validation loss by learning rate, the best of each", INK, size=17)]
    for loss in (3.8, 4.0, 4.2, 4.4):
        y = 260 - 210 * (loss - low) / (high - low)
        parts += [
            line((90, y), (480, y), colour=SOFT, width=0.5, arrow=False),
            text(80, y + 6, f"{loss:g}", SOFT, "end", 17),
        ]
    rates = sorted({rate for losses in found.values() for rate in losses})
    place = {rate: 110 + 350 * number / (len(rates) - 1) for number, rate in enumerate(rates)}
    parts += [text(place[rate], 284, f"{rate:g}", SOFT, size=15) for rate in rates]
    for scheme, colour in (("residual", INK), ("ddl", THREE), ("ddl-cc-ec", ONE)):
        points = [
            (place[rate], 260 - 210 * (min(losses) - low) / (high - low))
            for rate, losses in sorted(found[scheme].items())
            if min(losses) <= high
        ]
        dots = "".join(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4.5" fill="var(--{colour})"/>' for x, y in points)
        parts += [
            line(*points, colour=colour, arrow=False),
            dots,
            text(points[-1][0] + 12, points[-1][1] + 6, scheme, colour, "start", 17),
        ]
    return picture(296, *parts)


def gain_and_time() -> str:
    """ResBench at 0.3 million parameters: the gain on the plain residual at equal tokens, and the time of a step."""
    parts = [text(320, 22, "0.3 million parameters: gain in nats per token", INK, size=17)]
    for gain in (0, 0.1, 0.2, 0.3):
        y = 270 - 600 * gain
        parts += [
            line((70, y), (600, y), colour=SOFT, width=0.5, arrow=False),
            text(60, y + 6, f"{gain:g}", SOFT, "end", 17),
        ]
    parts += [text(90 + 1000 * (ratio - 1), 296, f"{ratio:g}", SOFT, size=17) for ratio in (1, 1.1, 1.2, 1.3, 1.4)]
    parts.append(text(320, 318, "time of a step, the plain residual = 1", SOFT, size=17))
    with (ROOT / "resbench" / "records" / "main" / "results.csv").open(encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if (row["size"], row["baseline"]) == ("0.3M", "residual")]
    gains = {row["scheme"]: -float(row["difference"]) for row in rows if row["measure"] == "tokens"}
    times = {row["scheme"]: float(row["cost"]) for row in rows if row["measure"] == "seconds"}
    for scheme, anchor in (
        ("lambdas", "start"),
        ("lambdas+conv", "start"),
        ("residual+tc", "start"),
        ("lambdas+tc", "start"),
        ("ddl-tc", "end"),
        ("ddl-tc-write-only", "end"),
    ):
        x, y = 90 + 1000 * (times[scheme] - 1), 270 - 600 * gains[scheme]
        parts += [
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5.5" fill="var(--one)"/>',
            text(
                x + (11 if anchor == "start" else -11),
                y + (-3 if scheme == "lambdas+tc" else 6),
                scheme,
                INK,
                anchor,
                17,
            ),
        ]
    return picture(328, *parts)


PICTURES = {
    "read-sublayer-write": connection,
    "icon": icon,
    "delta-write": lambda: delta(equation=True),
    "family-scales": scales,
    "family-delta": delta,
    "family-update": update,
    "family-streams": streams,
    "family-rotations": rotations,
    "family-depth": depth,
    "speed-steps": training_time,
    "tuning-rates": learning_rates,
    "hugging-face-tokens": token_time,
    "which-gain": gain_and_time,
    "study-steps": lambda: flow(
        ("tune", "equal budgets"),
        ("train", "fresh seeds"),
        ("time", "in rounds"),
        ("report", "with intervals"),
    ),
    "language-models-steps": lambda: flow(
        ("prepare", "text to tokens"),
        ("train", "a run folder"),
        ("compare", "loss differences"),
        ("explore", "gates by token"),
    ),
    "testing-steps": lambda: flow(
        ("parameters", "ours, random"),
        ("your module", "and ours"),
        ("checks", "both compared"),
        ("verdict", "or the mistake"),
    ),
}


if __name__ == "__main__":
    for name, draw in PICTURES.items():
        (DOCS / f"{name}.svg").write_text(draw(), encoding="utf-8")
