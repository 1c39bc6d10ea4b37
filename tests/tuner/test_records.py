"""What is published about the records is what they are."""

from __future__ import annotations

import json
import math
from pathlib import Path

from tests.fakes.records import resolved_run
from tuner.answer import Recommendation
from tuner.records import Estimate

SCHEMA = Path(__file__).parents[2] / "docs" / "recommendation.schema.json"


def test_the_published_schema_is_the_one_in_force() -> None:
    """Whoever reads recommendation.json by the published schema reads what is written today."""
    assert json.loads(SCHEMA.read_text()) == Recommendation.model_json_schema(mode="serialization")


def test_the_answer_has_the_keys_scripts_rely_on() -> None:
    """The contract of recommendation.json: verdict, knee, both profiles, baseline, time, provenance."""
    answer = json.loads(resolved_run().recommendation.model_dump_json())
    assert {
        *("schema_version", "verdict", "knee", "production", "protective", "safe_rate_rps", "baseline", "pareto"),
        *("time", "provenance", "warnings"),
    } <= answer.keys()
    assert {"load", "interval", "signals", "cross_checks", "binding", "cautious_load"} <= answer["knee"].keys()
    for profile in (answer["production"], answer["protective"]):
        assert {"config", "operating_point", "trial", "evidence"} <= profile.keys()
        point = profile["operating_point"]
        assert {"load", "num_preemptions", "peak_memory_bytes"} <= point.keys()
        for figure in ("output_throughput", "ttft_p95_ms", "itl_p95_ms"):
            assert {"value", "low", "high", "num_samples"} == point[figure].keys()
    assert {"wall_s", "start_s", "measure_s", "overhead_s"} <= answer["time"].keys()


def test_an_unknown_figure_stays_unknown_on_disk() -> None:
    """A figure without samples is written as null and read back as unknown: never as a zero, never as a string."""
    unknown = Estimate(value=math.nan, num_samples=0)
    written = unknown.model_dump_json()
    assert json.loads(written)["value"] is None
    assert math.isnan(Estimate.model_validate_json(written).value)
    assert math.isnan(Estimate.model_validate_json('{"value": "NaN", "num_samples": 0}').value)


def test_the_published_schema_allows_an_unknown_figure() -> None:
    """A reader that validates by the schema must not reject an answer in which nothing was measured for one figure."""
    value = json.loads(SCHEMA.read_text())["$defs"]["Estimate"]["properties"]["value"]
    assert {option["type"] for option in value["anyOf"]} == {"number", "null"}
