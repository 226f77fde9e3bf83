"""When the Feeder's actor ends by itself."""

from __future__ import annotations

import pytest

from shoal.platform import feed_actor
from shoal.platform.feed_actor import FeederActor


@pytest.fixture
def feeder(monkeypatch):
    """A FeederActor without its thread, its data and its watchdog, last asked at time 0."""
    actor = object.__new__(FeederActor)
    actor._controller, actor._idle_s, actor._last_asked = "shoal:run:controller", 600.0, 0.0
    return actor


@pytest.mark.parametrize(
    ("now", "is_alive", "sign"),
    [(599.0, False, 0.0), (601.0, False, 0.0), (601.0, True, 601.0), (10.0, True, 0.0)],
)
def test_idle_feeder_lives_as_long_as_its_controller(feeder, monkeypatch, now, is_alive, sign):
    monkeypatch.setattr(feed_actor, "_is_alive", lambda name: is_alive)
    monkeypatch.setattr(feed_actor, "_now", lambda: now)
    assert feeder._last_sign_of_life() == sign
