from operator import itemgetter

from residua.lab.records.table import Table, grouped, print_table


def test_runs_are_grouped_by_identity_in_the_order_of_seeds_and_the_last_of_a_seed_counts():
    runs = [("b", 1, 5.0), ("a", 2, 1.0), ("b", 0, 3.0), ("b", 1, 4.0)]
    assert grouped(runs, itemgetter(0), itemgetter(1)) == [(("b", 0, 3.0), ("b", 1, 4.0)), (("a", 2, 1.0),)]


def test_markdown_aligns_numbers_and_keeps_bars_as_text():
    table = Table(["scheme", "|H|"], [["a|b", "1"]])
    assert table.markdown(1) == "| scheme | \\|H\\| |\n| --- | ---: |\n| a\\|b | 1 |"
    assert table.markdown().splitlines()[1] == "| --- | --- |"


def test_markdown_shows_markup_in_cells_as_text():
    """Names of runs, labels and settings come from files that somebody may have sent."""
    table = Table(["<b>"], [["<img src=x onerror=y>&lt;"], ["[here](javascript:z)"], ["a\nb\x1b[2J"]])
    head, _, *cells = table.markdown().splitlines()
    assert head == "| &lt;b> |"
    assert cells == ["| &lt;img src=x onerror=y>&amp;lt; |", "| [here]\\(javascript:z) |", "| a b\\u001b[2J |"]


def test_a_narrow_terminal_shows_several_tables_that_repeat_the_first_column(capsys, monkeypatch):
    header, rows = ["scheme", "loss", "seconds"], [["residual", "3.10", "9"], ["ddl", "", "10"], ["mhc", "12.00", ""]]
    print_table(header, rows)
    wide = capsys.readouterr().out
    assert wide.splitlines()[2:] == ["residual   3.10        9", "ddl                   10", "mhc       12.00"]
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "24")
    print_table(header, rows)
    assert capsys.readouterr().out == wide
    for columns in ("23", "5"):  # a column that is too wide by itself stays whole
        monkeypatch.setenv("COLUMNS", columns)
        print_table(header, rows)
        losses, seconds = capsys.readouterr().out.split("\n\n")
        assert losses.splitlines()[2:] == ["residual   3.10", "ddl", "mhc       12.00"]
        assert seconds.splitlines()[2:] == ["residual        9", "ddl            10", "mhc"]
