"""``quiver plan``: reading a fleet, simulating racks, and one clear line for bad input."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from quiver.allocation import Policy
from quiver.errors import Misconfigured
from quiver_client.cli.plan import command
from quiver_client.planning import read_fleet, simulate
from quiver_client.planning.placement import place
from quiver_client.planning.rack import Run, readers

GB, MB = 1e9, 1e6
RACKS = """
[[racks]]
name = "rack"
count = {racks}
nodes = 2
ssd_per_node = "{ssd}"
origins = {{ s3 = "100MB/s" }}
"""
HEADER = "name,dataset,size,origin,rate,ranks,start,duration,epochs,tenant,group,ordered,rack\n"


def fleet(folder: Path, *rows: str, racks: int = 1, ssd: str = "1GB", more: str = "") -> Path:
    """Write a plan whose trace has these rows; ``more`` comes first in the TOML file."""
    (folder / "trace.csv").write_text(HEADER + "".join(row + "\n" for row in rows))
    path = folder / "fleet.toml"
    path.write_text(more + '\ntrace = "trace.csv"\n' + RACKS.format(racks=racks, ssd=ssd))
    return path


def ran(path: Path, policy: Policy = Policy.MAX_MIN) -> dict[str, dict[str, Any]]:
    """Return the jobs of the plan by name."""
    return {job["name"]: job for job in simulate(read_fleet(path), policy).jobs()}


# --- the simulation ---------------------------------------------------------------------------------------------------


def test_a_job_alone_reads_its_first_epoch_from_the_origin_and_then_what_is_not_cached(tmp_path: Path) -> None:
    job = ran(fleet(tmp_path, "a,d,4GB,s3,160MB/s,1,0,,3,,,false,"))["a"]
    # 2 of 4 GB fit: an epoch at 100 MB/s, then two in which half of the bytes come from the origin, at full speed.
    assert job["end_seconds"] == pytest.approx(40 + 25 + 25)
    assert job["origin_bytes"] == pytest.approx(4 * GB + 2 * 2 * GB)
    assert job["waiting"] == pytest.approx((40 - 25) / 90)


def test_a_job_of_a_duration_does_as_much_as_it_would_in_that_time_without_waiting(tmp_path: Path) -> None:
    job = ran(fleet(tmp_path, "a,d,40GB,s3,50MB/s,4,0,100s,,,,true,"))["a"]
    assert job["full_speed"] == 200 * MB
    assert job["end_seconds"] == pytest.approx(200)


def test_jobs_that_substitute_read_one_stream_and_those_of_a_fixed_order_their_own(tmp_path: Path) -> None:
    shared = ran(fleet(tmp_path, *(f"j{n},d,10GB,s3,80MB/s,1,0,,1,,,false," for n in range(4))))
    assert sum(job["origin_bytes"] for job in shared.values()) == pytest.approx(10 * GB)
    assert shared["j3"]["waiting"] == pytest.approx(0)
    alone = ran(fleet(tmp_path, *(f"j{n},d,10GB,s3,80MB/s,1,0,,1,,,true," for n in range(4))))
    assert alone["j3"]["waiting"] > 0.6


def test_trials_of_a_group_count_once(tmp_path: Path) -> None:
    trials = [f"t{n},sweep,20GB,s3,100MB/s,1,0,,1,,g,false," for n in range(4)]
    grouped = ran(fleet(tmp_path, *trials, "one,other,20GB,s3,100MB/s,1,0,,1,,,false,"))
    assert grouped["one"]["waiting"] == pytest.approx(grouped["t0"]["waiting"], abs=0.02)


def test_groups_of_two_tenants_are_never_taken_for_one(tmp_path: Path) -> None:
    jobs = read_fleet(fleet(tmp_path, "x,d,4GB,s3,9MB/s,1,0,,3,a,b/c,,", "y,d,4GB,s3,9MB/s,1,0,,3,a/b,c,,")).jobs
    assert len(readers([Run(job) for job in jobs])) == 2


def test_a_rack_that_holds_everything_reads_it_once(tmp_path: Path) -> None:
    rows = [f"j{n},d{n},1GB,s3,50MB/s,1,{n}h,,20,,,false," for n in range(3)]
    assert ran(fleet(tmp_path, *rows, ssd="5GB"))["j2"]["origin_bytes"] == pytest.approx(1 * GB)


def test_a_dataset_that_nobody_reads_any_more_is_kept_while_there_is_room(tmp_path: Path) -> None:
    later = ran(fleet(tmp_path, "a,d,1GB,s3,50MB/s,1,0,,2,,,false,", "b,d,1GB,s3,50MB/s,1,1h,,1,,,false,"))["b"]
    assert later["origin_bytes"] == 0


def test_under_las_a_new_trial_does_not_wait_behind_a_long_job(tmp_path: Path) -> None:
    rows = ["long,d,1TB,s3,100MB/s,1,0,,1,,,true,", "trial,e,2GB,s3,100MB/s,1,1h,,1,,,true,"]
    fair, las = ran(fleet(tmp_path, *rows)), ran(fleet(tmp_path, *rows), Policy.LAS)
    assert las["trial"]["end_seconds"] - 3600 < 0.75 * (fair["trial"]["end_seconds"] - 3600)
    assert las["long"]["end_seconds"] == pytest.approx(fair["long"]["end_seconds"], rel=0.01)


@pytest.mark.parametrize("policy", list(Policy))
def test_bytes_are_conserved_and_nobody_is_faster_than_its_full_speed(tmp_path: Path, policy: Policy) -> None:
    rows = [
        f"j{n},d{n % 5},{1 + n % 5}GB,s3,{20 + 9 * n}MB/s,2,{7 * n}s,,{1 + n % 3},t{n % 2},,{n % 3 == 0},"
        for n in range(15)
    ]
    outcome = simulate(read_fleet(fleet(tmp_path, *rows, racks=2, more='quotas.t0 = "1GB"')), policy)
    for run in outcome.runs:
        seconds = run.ended - run.job.start
        assert run.read_bytes == pytest.approx(run.job.work_bytes)
        assert run.read_bytes <= run.job.rate * seconds * (1 + 1e-6)
        assert run.waited_seconds == pytest.approx(seconds - run.job.work_bytes / run.job.rate, abs=1e-3)
        assert run.origin_bytes <= run.read_bytes * (1 + 1e-6)
    ends = max(run.ended for run in outcome.runs)
    assert sum(run.origin_bytes for run in outcome.runs) <= 2 * 100 * MB * ends * (1 + 1e-6)


def test_a_job_whose_origin_gives_too_little_to_ever_end_is_said_to_never_end() -> None:
    from quiver_client.planning.fleet import DatasetPlan, Fleet, Job, Rack

    job = Job(name="a", dataset="d", rate=1.0, work_bytes=10.0)
    stuck = Fleet((Rack("r", 5.0, {"o": 0.0}),), {"d": DatasetPlan("d", 10.0, "o")}, (job,))
    outcome = simulate(stuck, Policy.MAX_MIN)
    assert outcome.totals()["never_end"] == 1
    assert outcome.jobs()[0]["end_seconds"] is None


# --- placement --------------------------------------------------------------------------------------------------------


def test_jobs_are_spread_and_those_of_a_dataset_kept_together_when_asked(tmp_path: Path) -> None:
    rows = [f"j{n},d{n % 2},1GB,s3,10MB/s,1,0,,9,,,false," for n in range(8)] + ["own,d0,,,1MB/s,1,0,,1,,,,rack-3"]
    spread = place(read_fleet(fleet(tmp_path, *rows, racks=4)))
    assert [len(jobs) for jobs in spread.values()] == [2, 2, 3, 2]
    assert "own" in {job.name for job in spread["rack-3"]}
    together = place(read_fleet(fleet(tmp_path, *rows[:-1], racks=4, more='placement = "together"')))
    assert sorted(len(jobs) for jobs in together.values()) == [0, 0, 4, 4]


# --- the command ------------------------------------------------------------------------------------------------------


def test_the_report_says_that_it_is_a_simulation_and_is_whole_as_json(tmp_path: Path) -> None:
    path = fleet(tmp_path, "a,d,4GB,s3,160MB/s,1,0,,3,,,false,")
    shown = CliRunner().invoke(command, [str(path), "--jobs"])
    assert shown.exit_code == 0
    assert "Simulation" in shown.output
    assert all(policy.value in shown.output for policy in Policy)
    told = CliRunner().invoke(command, [str(path), "--json", "--policy", "cost"])
    report = json.loads(told.output)
    assert report["simulation"] is True
    assert list(report["policies"]) == ["cost"]
    assert report["policies"]["cost"]["by_job"][0]["name"] == "a"
    assert report["policies"]["cost"]["origin_bytes"] == pytest.approx(8 * GB)


def test_names_that_nothing_else_in_the_plan_has_are_noted(tmp_path: Path) -> None:
    path = fleet(tmp_path, "a,d,4GB,S3,160MB/s,1,0,,3,vision,,false,")
    with path.open("a") as file:
        file.write("[weights]\nvision = 2\nvison = 3\n[quotas]\ntext = '1GB'\n")
    assert list(read_fleet(path).notes) == [
        "origin 'S3' is no limit: no rack's origins name it",
        "the weight of tenant 'vison' has no effect: no job has it",
        "the quota of tenant 'text' has no effect: no job has it",
    ]
    assert json.loads(CliRunner().invoke(command, [str(path), "--json"]).stdout)["notes"] == [*read_fleet(path).notes]
    assert not read_fleet(fleet(tmp_path, GOOD)).notes


def test_planning_needs_neither_torch_nor_a_terminal_library() -> None:
    code = "import sys, quiver_client.planning; print([m for m in ('torch', 'click', 'rich') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"


GOOD = "a,d,4GB,s3,160MB/s,1,0,,3,,,false,"
BAD_ROWS = {
    "a hole": ("a,d,4GB,s3,,1,0,,3,,,false,", "row 2: rate is missing"),
    "an empty row": (",,,,,,,,,,,,", "row 2: the row is empty"),
    "a short row": ("a,d,4GB", "row 2: 3 values for 13 columns"),
    "a negative size": ("a,d,-4GB,s3,1MB/s,1,0,,3,,,false,", "row 2: size: not a size: '-4GB'"),
    "a rate of nothing": ("a,d,4GB,s3,0,1,0,,3,,,false,", "row 2: rate is '0'"),
    "a rate that is no number": ("a,d,4GB,s3,fast,1,0,,3,,,false,", "row 2: rate is 'fast'"),
    "no size": ("a,d,,s3,1MB/s,1,0,,3,,,false,", "row 2: size is missing"),
    "no name": (",d,4GB,s3,1MB/s,1,0,,3,,,false,", "row 2: name is missing"),
    "a control character": ("a\x1b[2J,d,4GB,s3,1MB/s,1,0,,3,,,false,", "which does not print"),
    "a name that is too long": ("a" * 200 + ",d,4GB,s3,1MB/s,1,0,,3,,,false,", "more than 128 bytes"),
    "no ranks": ("a,d,4GB,s3,1MB/s,0,0,,3,,,false,", "row 2: ranks is '0'"),
    "ranks in too many digits": (f"a,d,4GB,s3,1MB/s,{'1'.zfill(20)}9999,0,,3,,,false,", "row 2: ranks is '0000"),
    "a negative start": ("a,d,4GB,s3,1MB/s,1,-5,,3,,,false,", "row 2: start is '-5'"),
    "neither epochs nor duration": ("a,d,4GB,s3,1MB/s,1,0,,,,,false,", "row 2: neither epochs nor duration"),
    "both": ("a,d,4GB,s3,1MB/s,1,0,1h,3,,,false,", "row 2: both epochs and duration"),
    "epochs of nothing": ("a,d,4GB,s3,1MB/s,1,0,,0,,,false,", "row 2: epochs is '0'"),
    "epochs that never end": ("a,d,4GB,s3,1MB/s,1,0,,inf,,,false,", "row 2: epochs is 'inf'"),
    "epochs past all counting": ("a,d,4GB,s3,1MB/s,1,0,,1e308,,,false,", "row 2: epochs is '1e308'"),
    "a number of 5,000 digits": (f"a,d,4GB,s3,1MB/s,{'9' * 5000},0,,3,,,false,", "9…; it must be a whole number"),
    "a rate as it was written": ("a,d,4GB,s3,-5MB/s,1,0,,3,,,false,", "row 2: rate is '-5MB/s'"),
    "neither true nor false": ("a,d,4GB,s3,1MB/s,1,0,,3,,,maybe,", "row 2: ordered is 'maybe'"),
    "a rack that is not there": ("a,d,4GB,s3,1MB/s,1,0,,3,,,false,elsewhere", "row 2: there is no rack 'elsewhere'"),
}


@pytest.mark.parametrize("what", sorted(BAD_ROWS))
def test_a_bad_row_is_one_line_that_names_it(tmp_path: Path, what: str) -> None:
    row, message = BAD_ROWS[what]
    with pytest.raises(Misconfigured) as caught:
        read_fleet(fleet(tmp_path, row))
    assert message in str(caught.value)
    assert str(caught.value).isprintable()


BAD_FILES = {
    "no TOML": ("racks = [", "is no TOML"),
    "no racks": ("placement = 'spread'", "no [[racks]]"),
    "an unknown key": (RACKS.format(racks=1, ssd="1GB") + "\n[speed]\n", "'speed' is not known"),
    "a negative disk": (RACKS.format(racks=1, ssd="-1GB"), "ssd_per_node: not a size"),
    "no racks at all": (RACKS.format(racks=0, ssd="1GB"), "count is 0"),
    "no jobs": (RACKS.format(racks=1, ssd="1GB"), "has no jobs"),
    "an unknown placement": (
        "placement = 'best'\n" + RACKS.format(racks=1, ssd="1GB"),
        "write one of spread, together",
    ),
    "a weight that is no number": (RACKS.format(racks=1, ssd="1GB") + "[weights]\na = 'big'", "weights.a is 'big'"),
    "a quota that is no size": (RACKS.format(racks=1, ssd="1GB") + "[quotas]\na = true", "quotas.a is True"),
    "racks that are no tables": ("racks = 4", "write [[racks]]"),
    "a weight of nothing": (RACKS.format(racks=1, ssd="1GB") + "[weights]\na = 1e-300", "weights.a is 1e-300"),
    "a quota above the capacity": (
        RACKS.format(racks=1, ssd="1GB") + "[quotas]\na = '2.1GB'",
        "quotas.a is '2.1GB', more than the SSDs of any rack hold together",
    ),
    "a tenant's name that does not print": (RACKS.format(racks=1, ssd="1GB") + '[weights]\n"\\u001b" = 1', "not print"),
    "a number that TOML has not": (RACKS.format(racks=1, ssd="1GB") + f"[weights]\na = 0x{'f' * 5000}", "64 bits"),
    "a number of 5,000 digits": (RACKS.format(racks=1, ssd="1GB") + f"[weights]\na = {'9' * 5000}", "is no TOML"),
    "lists in lists without end": ("a = " + "[" * 5000, "is no TOML"),
}


@pytest.mark.parametrize("what", sorted(BAD_FILES))
def test_a_bad_file_is_one_line_that_says_what_to_write(tmp_path: Path, what: str) -> None:
    text, message = BAD_FILES[what]
    jobs = (
        ""
        if what in {"no jobs", "no TOML", "racks that are no tables"}
        else ('\n[[jobs]]\nname = "a"\ndataset = "d"\nsize = "1GB"\nrate = "1MB/s"\nepochs = 1\n')
    )
    path = tmp_path / "fleet.toml"
    path.write_text(text + jobs)
    with pytest.raises(Misconfigured) as caught:
        read_fleet(path)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_same_job_twice_and_a_dataset_of_two_sizes_are_named_with_their_rows(tmp_path: Path) -> None:
    with pytest.raises(Misconfigured, match=r"row 3: job 'a' is there already, at .*row 2"):
        read_fleet(fleet(tmp_path, GOOD, GOOD))
    with pytest.raises(Misconfigured, match="row 3: dataset 'd' has another size"):
        read_fleet(fleet(tmp_path, GOOD, "b,d,5GB,s3,160MB/s,1,0,,3,,,false,"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "row 1: no column 'name'"),
        ("name,dataset,rate,colour\n", "row 1: column 'colour' is not known"),
        ("name,name,dataset,rate\n", "row 1: a column is there twice"),
        ('name,dataset,rate\n"a', "row 2"),
        ("x" * 2_000_000, "row 1: field larger than field limit"),
    ],
)
def test_a_trace_with_a_bad_header_or_quotes_is_one_line(tmp_path: Path, text: str, message: str) -> None:
    path = fleet(tmp_path)
    (tmp_path / "trace.csv").write_text(text)
    with pytest.raises(Misconfigured) as caught:
        read_fleet(path)
    assert message in str(caught.value)


def test_an_unknown_policy_is_wrong_usage(tmp_path: Path) -> None:
    result = CliRunner().invoke(command, [str(fleet(tmp_path, GOOD)), "--policy", "best"], standalone_mode=False)
    assert isinstance(result.exception, click.UsageError)
    assert "'best' is not one of" in str(result.exception.format_message())
