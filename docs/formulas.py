"""Formulas of the site as MathML, made when it is built: `$...$` in pages, and the plain equations of schemes."""

import re
from html import escape

GREEK = ("alpha", "beta", "gamma", "delta", "lambda", "mu", "rho", "sigma", "tau", "theta")
OPERATORS = ("softmax", "sigmoid", "tanh", "gelu", "norm", "rms", "mean", "block")
SYMBOLS = {"<=": r"\le ", "<-": r"\leftarrow ", ".": r"\cdot ", "*": ""}

TOKEN = re.compile(r"a(?= [A-Z]?[a-z]{3})|[A-Za-z]+~?|\d+|<=|<-|<(?=\w)|\s+|.", re.DOTALL)
MATHS = re.compile(r"(^```.*?^```|`[^`\n]*`)|(?<![\\\w])(\$\$?)([^$\n]+)\$\$?", re.DOTALL | re.MULTILINE)


def mathml(latex: str, display: str = "inline") -> str:
    """Return the MathML of a formula in LaTeX."""
    from latex2mathml.converter import convert

    return convert(latex, display=display)


def latex_of(equation: str) -> str:
    """Return the LaTeX of a scheme's equation, as `h_res X + h_post F(norm(h_pre X))`; words stay words."""
    parts: list[str] = []
    below = norm = angle = False
    for token in TOKEN.findall(re.sub(r"\b([a-z])(\d)", r"\1_\2", equation)):
        name = token.rstrip("~")
        if name.isalpha():
            part = symbol(name, below)
            parts.append(rf"\tilde{{{part}}}" if token != name else part)
        elif token == "|":
            norm = not norm
            parts.append(r"\lVert " if norm else r"\rVert ")
        elif token == "<" or (token == ">" and angle):
            angle = token == "<"
            parts.append(r"\langle " if angle else r"\rangle ")
        else:
            parts.append(SYMBOLS.get(token, token))
        below = token == "_"
    return rooted("".join(parts))


def symbol(name: str, below: bool) -> str:
    """Return a name as LaTeX: a Greek letter, an operator, a variable, or text. `below`: it is a subscript."""
    if name in GREEK or name in ("sum", "sqrt"):
        return rf"\{name} "
    if name in OPERATORS:
        return rf"\text{{{name}}}"
    if len(name) == 1 or (below and name in ("ij", "kj")):
        return f"{{{name}}}" if below else name
    return rf"{{\text{{{name}}}}}" if below else rf"\text{{ {name} }}"


def rooted(latex: str) -> str:
    """Put the parentheses after a square root into braces."""
    start = latex.find(r"\sqrt (")
    if start < 0:
        return latex
    depth, end = 1, start + len(r"\sqrt (")
    while depth:
        depth += {"(": 1, ")": -1}.get(latex[end], 0)
        end += 1
    inside = latex[start + len(r"\sqrt (") : end - 1]
    return rf"{latex[:start]}\sqrt{{{inside}}}{rooted(latex[end:])}"


def displayed(equation: str) -> str:
    """Return a scheme's equation as formulas of a page, one paragraph for each definition."""
    parts = re.split(r", (?=[A-Za-z]+(?:_\w+)? (?:=|a |the |orth|doubly|nearly))", equation)
    return "\n\n".join(f"$${latex_of(part)}$$" for part in parts)


class Formulas:
    """The formulas of a page: taken out before Markdown reads it, and put back as MathML afterwards."""

    def __init__(self) -> None:
        self.found: list[str] = []

    def taken_out(self, markdown: str) -> str:
        return MATHS.sub(self._place, markdown)

    def put_back(self, html: str) -> str:
        return re.sub(r"FORMULA(\d+)END", lambda match: self.found[int(match[1])], html)

    def _place(self, match: re.Match[str]) -> str:
        if match[1]:
            return match[1]
        display = "block" if match[2] == "$$" else "inline"
        self.found.append(mathml(match[3], display))
        return f"FORMULA{len(self.found) - 1}END"


def labelled(html: str) -> str:
    """Give every cell of a table the heading of its column, which a phone shows in front of it."""
    return re.sub(r"<table>.*?</table>", lambda match: _labelled(match[0]), html, flags=re.DOTALL)


def _labelled(table: str) -> str:
    headings = [re.sub(r"<[^>]+>", "", cell).strip() for cell in re.findall(r"<th[^>]*>(.*?)</th>", table, re.DOTALL)]
    column = 0

    def named(match: re.Match[str]) -> str:
        nonlocal column
        if match[1]:
            column = 0
            return match[0]
        heading = headings[column] if column < len(headings) else ""
        column += 1
        return f'<td{match[2]} data-label="{escape(heading)}"><div>{match[3]}</div></td>'

    return re.sub(r"(<tr>)|<td([^>]*)>(.*?)</td>", named, table, flags=re.DOTALL)
