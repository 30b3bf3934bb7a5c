import pytest

import simckpt
from simckpt import presentation


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 B"), (999, "999 B"), (1_000, "1.0 KB"), (21_500_000, "21.5 MB"), (3e9, "3.0 GB"), (4e15, "4000.0 TB")],
)
def test_sizes_are_in_powers_of_a_thousand(nbytes: float, text: str) -> None:
    assert presentation.size(nbytes) == text


def test_counts_have_a_plural() -> None:
    assert [presentation.count(n, "run") for n in (0, 1, 1_024)] == ["0 runs", "1 run", "1,024 runs"]


def test_control_characters_are_spelled_out() -> None:
    assert presentation.printable("\x1b[31mred\n") == "\\x1b[31mred\\n"
    assert presentation.printable("a\nb", keep="\n") == "a\nb"
    assert presentation.printable("é │ 汉") == "é │ 汉"


def test_a_table_shows_texts_as_they_are() -> None:
    html = presentation.html_table(("<a>", "b"), [("x & y", "<script>alert(1)</script>")], caption="<i>\x1b")
    assert "<script>" not in html
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in html
    assert "x &amp; y" in html
    assert "&lt;i&gt;\\x1b" in html


def test_a_short_row_of_a_table_goes_on_to_its_end() -> None:
    html = presentation.html_table(("a", "b", "c"), [("1", "2", "3"), ("all of it",)])
    assert html.count('colspan="3"') == 1


@pytest.fixture
def store(tmp_path) -> simckpt.Store:
    store = simckpt.Store(tmp_path / "s")
    with store.start("ant") as run:
        run.configure({"learning_rate": 3e-4})
        checkpointer = run.checkpointer({"loop": simckpt.LoopState(x=1)}, save_when=simckpt.EverySteps(1))
        checkpointer.save(1_000, {"eval/return": 12.5})
    return store


def test_a_checkpoint_shows_itself_in_a_notebook(store) -> None:
    checkpoint = store.run("ant").latest()
    checkpoint.tag("paper")
    html = checkpoint._repr_html_()
    for text in ("ant at step 1,000", checkpoint.id, "eval/return 12.5", "learning_rate=0.0003", "paper", "loop"):
        assert text in html


def test_a_checkpoint_whose_start_is_damaged_shows_the_rest(store, tmp_path) -> None:
    (start,) = (tmp_path / "s/runs/ant/starts").iterdir()
    start.write_bytes(b"nonsense")
    html = store.run("ant").latest()._repr_html_()
    assert "eval/return 12.5" in html
    assert start.name in html


def test_stores_and_runs_show_themselves_in_a_notebook(store, tmp_path) -> None:
    for shown in (store, store.run("ant")):
        assert "1,000" in shown._repr_html_()
        assert "eval/return 12.5" in shown._repr_html_()
    assert "Store" in simckpt.Store(tmp_path / "empty")._repr_html_()
