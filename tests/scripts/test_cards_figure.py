"""The picture of seconds over cards: what a bar is made of, and that it is drawn from the files that ship."""

from pathlib import Path

import cards_figure
import pytest

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks" / "several-gpus" / "four-cards"


def test_the_parts_of_a_bar_add_up_to_the_steps_after_the_first():
    parts = cards_figure.seconds(FOLDER / "step-7b-cards4.json")
    assert parts["rollout"] == pytest.approx(1.605, abs=0.001)
    assert parts["training"] == pytest.approx(0.898, abs=0.001)
    assert sum(parts.values()) == pytest.approx((2.7253 + 2.9063 + 2.8351) / 3, abs=1e-4)
    assert cards_figure.peer(FOLDER / "step-7b-trl-cards4.json") == pytest.approx((5.1405 + 5.2337) / 2, abs=1e-4)


def test_it_is_drawn_and_without_arguments_says_how(tmp_path, monkeypatch):
    picture = tmp_path / "cards.png"
    monkeypatch.setattr("sys.argv", ["cards_figure.py", str(FOLDER), str(picture)])
    cards_figure.main()
    assert picture.read_bytes().startswith(b"\x89PNG")
    monkeypatch.setattr("sys.argv", ["cards_figure.py"])
    with pytest.raises(SystemExit, match="Draw seconds per step"):
        cards_figure.main()
