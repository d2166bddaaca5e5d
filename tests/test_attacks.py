"""Inputs that grow, full disks, closed streams and names that command: each has its answer."""

from __future__ import annotations

from pathlib import Path

import attacks
import pytest


@pytest.mark.parametrize("attack", attacks.ATTACKS, ids=lambda attack: attack.name)
def test_an_attack_has_its_answer(attack: attacks.Attack, tmp_path: Path) -> None:
    wrong, _ = attacks.run(attack, tmp_path)
    assert not wrong


def test_every_attack_is_in_the_docs() -> None:
    page = attacks.PAGE.read_text(encoding="utf-8")
    assert [one.name for one in attacks.ATTACKS if f"| {one.name} |" not in page] == []
