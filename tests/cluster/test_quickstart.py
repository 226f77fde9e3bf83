"""The quickstart from data files to the printed comparison, with 2 workers, on a small stand-in for MovieLens."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from shoal.jobs import movielens
from shoal.jobs.quickstart import quickstart
from shoal.platform.config_file import load_config

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

NUM_USERS, NUM_ITEMS, NUM_RATINGS = 50, 40, 3000


def write_stand_in(folder: Path) -> Path:
    """The three files of the data set with few users and items, and ratings that both decide."""
    folder.mkdir()
    rng = np.random.default_rng(0)
    user, item = rng.integers(0, NUM_USERS, NUM_RATINGS), rng.integers(0, NUM_ITEMS, NUM_RATINGS)
    liking = rng.standard_normal(NUM_USERS)[user] + rng.standard_normal(NUM_ITEMS)[item]
    rating = np.clip(np.round(3.5 + liking + 0.5 * rng.standard_normal(NUM_RATINGS)), 1, 5).astype(int)
    genres = ("Comedy", "Drama", "Action Drama")
    lines = {
        "ml-100k.inter": [f"{u}\t{i}\t{r}\t{t}" for t, (u, i, r) in enumerate(zip(user, item, rating))],
        "ml-100k.user": [f"{u}\t{20 + u % 30}\t{'MF'[u % 2]}\tjob{u % 4}\t0" for u in range(NUM_USERS)],
        "ml-100k.item": [f"{i}\tname\t{1980 + i % 20}\t{genres[i % 3]}" for i in range(NUM_ITEMS)],
    }
    headers = {
        "ml-100k.inter": "user_id:token\titem_id:token\trating:float\ttimestamp:float",
        "ml-100k.user": "user_id:token\tage:token\tgender:token\toccupation:token\tzip_code:token",
        "ml-100k.item": "item_id:token\tmovie_title:token_seq\trelease_year:token\tclass:token_seq",
    }
    for name in movielens.FILES:
        (folder / name).write_text("\n".join([headers[name], *lines[name]]) + "\n", encoding="utf-8")
    return folder


def test_quickstart_trains_with_two_workers_and_prints_every_row(local_ray, tmp_path):
    pytest.importorskip("sklearn")
    said: list[str] = []
    report = quickstart(
        num_workers=2, seed=3, out=tmp_path / "out", data=write_stand_in(tmp_path / "data"), echo=said.append
    )
    text = "\n".join(said)
    assert "2,400 / 300 / 300 rows" in text
    for row in ("DLRM, shoal, 2 workers", "logistic regression, scikit-learn, same split", "RecBole quick start"):
        assert sum(line.startswith(row) for line in text.splitlines()) == 1, text
    assert "shoal train" in text and "shoal eval" in text
    # Epochs of one batch each: too few steps to beat anything but chance.
    assert report["steps"] == 12 and report["dlrm"]["auc"] > 0.5
    assert 0.6 < report["logistic_regression"]["auc"] < 1
    config = load_config(report["job"])
    assert config.scaling.num_workers == 2 and config.run.run_dir == report["run_dir"]
