"""Ranks from the environments of launchers."""

from __future__ import annotations

import pytest

from moe_runtime.launch.environment import RankEnvironment, expand_hosts, likely_rank, read_environment

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "MASTER_ADDR": "head",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}
SLURM = {
    "SLURM_JOB_ID": "4242",
    "SLURM_STEP_ID": "3",
    "SLURM_PROCID": "6",
    "SLURM_NTASKS": "8",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_LOCALID": "2",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
}
LWS = {"LWS_LEADER_ADDRESS": "moe-0.moe.default", "LWS_GROUP_SIZE": "2", "LWS_WORKER_INDEX": "1"}


def without(environ: dict[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name not in names}


def test_without_a_launcher_there_is_one_rank() -> None:
    assert read_environment({"MASTER_ADDR": "x", "PATH": "/bin"}) == RankEnvironment(source="alone")


def test_torchrun_is_read_and_keeps_its_store() -> None:
    assert read_environment(TORCHRUN) == RankEnvironment(
        rank=5, size=8, local_rank=1, local_size=4, address="head", port=29500, has_store=True, source="torchrun"
    )  # fmt: skip


def test_variables_set_by_hand_have_no_store_yet() -> None:
    found = read_environment(without(TORCHRUN, "TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE"))
    assert (found.source, found.has_store, found.rank) == ("variables", False, 5)


def test_slurm_meets_on_the_first_host_at_a_port_of_the_step() -> None:
    found = read_environment(SLURM)
    assert found == RankEnvironment(
        rank=6, size=8, local_rank=2, local_size=4, address="gpu07", port=20000 + (8 * 4242 + 3) % 10000, source="SLURM"
    )  # fmt: skip
    assert not found.is_one_node
    assert read_environment(SLURM | {"SLURM_STEP_ID": "4"}).port != found.port
    chosen = read_environment(
        SLURM | {"MASTER_ADDR": "ib-gpu07", "MASTER_PORT": "1234", "GLOO_SOCKET_IFNAME": "ib0"}
    )
    assert (chosen.address, chosen.port, chosen.interface) == ("ib-gpu07", 1234, "ib0")


def test_slurm_on_one_node_stays_on_loopback() -> None:
    one = SLURM | {"SLURM_STEP_NODELIST": "gpu07", "SLURM_LOCALID": "6", "SLURM_NODEID": "0"}
    found = read_environment(without(one, "SLURM_STEP_TASKS_PER_NODE"))
    assert (found.address, found.local_size, found.is_one_node) == ("127.0.0.1", 8, True)


def test_the_counts_of_the_step_win_over_those_of_the_job() -> None:
    shell = SLURM | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0", "SLURM_STEP_TASKS_PER_NODE": "1"}
    assert read_environment(shell).size == 1
    uneven = SLURM | {"SLURM_STEP_TASKS_PER_NODE": "5,3"}
    assert read_environment(uneven).local_size == 3
    old = without(SLURM, "SLURM_STEP_NUM_TASKS")
    assert read_environment(old).size == 8


def test_a_batch_script_outside_srun_is_one_process() -> None:
    assert read_environment(without(SLURM, "SLURM_STEP_NODELIST")).source == "alone"


def test_torchrun_inside_srun_counts() -> None:
    assert read_environment(SLURM | TORCHRUN).source == "torchrun"


def test_a_pod_of_a_leader_worker_set_is_a_rank() -> None:
    assert read_environment(LWS) == RankEnvironment(
        rank=1, size=2, address="moe-0.moe.default", port=29500, source="LWS"
    )
    assert read_environment(LWS | {"MASTER_PORT": "77"}).port == 77
    assert read_environment(LWS | {"LWS_GROUP_SIZE": "1", "LWS_WORKER_INDEX": "0"}).size == 1


def test_torchrun_inside_the_pods_starts_several_ranks_in_each() -> None:
    found = read_environment(TORCHRUN | LWS)
    assert (found.source, found.rank, found.local_size) == ("torchrun", 5, 4)


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        (without(TORCHRUN, "WORLD_SIZE"), r"WORLD_SIZE \(''\) must be an integer; torchrun sets it"),
        (without(TORCHRUN, "LOCAL_RANK"), r"LOCAL_RANK \(''\) must be an integer"),
        (TORCHRUN | {"RANK": "8"}, r"RANK \(8\) must be in \[0, WORLD_SIZE\) with WORLD_SIZE \(8\)"),
        (TORCHRUN | {"LOCAL_RANK": "4"}, r"LOCAL_RANK \(4\) must be in \[0, LOCAL_WORLD_SIZE\)"),
        (TORCHRUN | {"LOCAL_WORLD_SIZE": "9"}, r"LOCAL_WORLD_SIZE \(9\) must be at most WORLD_SIZE \(8\)"),
        (TORCHRUN | {"MASTER_PORT": "0"}, r"MASTER_PORT \(0\) must be in \[1, 65535\]"),
        (without(TORCHRUN, "MASTER_ADDR"), r"MASTER_ADDR must be set where WORLD_SIZE \(8\) is above 1"),
        (SLURM | LWS, "SLURM_STEP_NODELIST and LWS_GROUP_SIZE must not both be set"),
        (without(SLURM, "SLURM_PROCID"), r"SLURM_PROCID \(''\) must be an integer; srun sets it"),
        (SLURM | {"SLURM_PROCID": "8"}, r"SLURM_PROCID \(8\) must be in \[0, SLURM_STEP_NUM_TASKS\)"),
        (SLURM | {"SLURM_LOCALID": "4"}, r"SLURM_LOCALID \(4\) must be in \[0, SLURM_STEP_TASKS_PER_NODE\)"),
        (
            SLURM | {"SLURM_NODEID": "2"},
            r"SLURM_NODEID \(2\) must be a node of SLURM_STEP_NODELIST \(2 hosts\)",
        ),
        (
            SLURM | {"SLURM_STEP_TASKS_PER_NODE": "4,3"},
            r"SLURM_STEP_NUM_TASKS \(8\) must be the sum of SLURM_STEP_TA",
        ),
        (SLURM | {"SLURM_STEP_TASKS_PER_NODE": "8"}, "must have a count for each of the 2 hosts"),
        (SLURM | {"SLURM_STEP_TASKS_PER_NODE": "four"}, r"\('four'\) must be counts such as 4\(x2\),3"),
        (SLURM | {"SLURM_STEP_NODELIST": "gpu[7-"}, "must be a list of hosts as SLURM writes it"),
        (without(LWS, "LWS_LEADER_ADDRESS"), "LWS_LEADER_ADDRESS must be set where LWS_GROUP_SIZE"),
        (LWS | {"LWS_WORKER_INDEX": "2"}, r"LWS_WORKER_INDEX \(2\) must be in \[0, LWS_GROUP_SIZE\)"),
        (
            TORCHRUN | LWS | {"WORLD_SIZE": "6"},
            r"WORLD_SIZE \(6\) must be LWS_GROUP_SIZE \(2\) times LOCAL_WORLD_SIZE",
        ),
        (
            TORCHRUN | LWS | {"LWS_WORKER_INDEX": "0"},
            r"RANK \(5\) must belong to pod 1, not to LWS_WORKER_INDEX \(0\)",
        ),
        (
            without(TORCHRUN, "TORCHELASTIC_RUN_ID") | SLURM,
            r"RANK, WORLD_SIZE and LOCAL_RANK \(5, 8, 1\) must be SLURM_PROCID, .* \(6, 8, 2\)",
        ),
    ],
)
def test_a_contradiction_is_one_message(environ: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        read_environment(environ)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("node1", ["node1"]),
        ("a,b.example.org", ["a", "b.example.org"]),
        ("gpu[07-10,12],login", ["gpu07", "gpu08", "gpu09", "gpu10", "gpu12", "login"]),
        ("gpu[098-101]", ["gpu098", "gpu099", "gpu100", "gpu101"]),
        ("r[1-2]n[1-2]-ib", ["r1n1-ib", "r1n2-ib", "r2n1-ib", "r2n2-ib"]),
    ],
)
def test_compressed_lists_of_hosts_expand(text: str, hosts: list[str]) -> None:
    assert expand_hosts(text) == hosts


@pytest.mark.parametrize("text", ["", "a[", "a[1-]", "a[x]", "a,,b", "a b"])
def test_other_text_is_no_list_of_hosts(text: str) -> None:
    with pytest.raises(ValueError, match=r"must be a list of hosts|neither a number nor a range"):
        expand_hosts(text)


@pytest.mark.parametrize(
    ("environ", "rank"),
    [({}, 0), (TORCHRUN, 5), (SLURM, 6), (LWS, 1), ({"RANK": "3"}, 3), ({"RANK": "x"}, 0)],
)
def test_messages_are_marked_even_where_the_environment_is_wrong(environ: dict[str, str], rank: int) -> None:
    assert likely_rank(environ) == rank
