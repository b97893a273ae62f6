"""Rank 0 of a check of 8,192 ranks that do not exist."""

from __future__ import annotations

import platform
from pathlib import Path

from stand_in_of_check import check_of

from hvdtrain.extras.check.report import to_text


def test_what_rank_0_gets_in_a_check_grows_by_a_packet_a_rank(tmp_path: Path) -> None:
    """The differences of a rank's facts, 1.3 kB in all; findings of 1,024 hosts are few lines."""
    (few, _), (many, report) = check_of(64, tmp_path / "few"), check_of(8192, tmp_path / "many")
    assert few.collectives == many.collectives and 0 < many.received_bytes < 512 * 8192, many
    assert [facts["pid"] for facts in report.ranks[1:]] == list(range(100_001, 108_192))
    assert {facts["versions"]["Python"] for facts in report.ranks} == {platform.python_version()}
    lines = to_text(report)
    assert len(report.findings) > 1000 and len(lines) < 400, (
        "one of each host that shares its cores"
    )
    assert any(line.endswith(" more like these; --json has all of them") for line in lines)
