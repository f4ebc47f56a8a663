"""What launchers set becomes a Job; what cannot be is an error that names it."""

import pytest

from minddp.environment import Job, bare_address, expand_hosts, from_environment
from minddp.errors import UsageError

# fmt: off
TORCHRUN = {
    "RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "1234",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
MPICH = {
    "PMI_RANK": "2", "PMI_SIZE": "3", "MPI_LOCALRANKID": "2", "MPI_LOCALNRANKS": "3",
}
SLURM = {
    "SLURM_PROCID": "3", "SLURM_NTASKS": "4", "SLURM_LOCALID": "1",
    "SLURM_JOB_NODELIST": "node[03-05,9]", "SLURM_JOB_ID": "77",
}
# fmt: on


def seat(job: Job) -> tuple[int, int, int, int]:
    return job.rank, job.world_size, job.local_rank, job.local_world_size


def test_without_variables_this_is_a_world_of_one():
    job = from_environment({})
    assert seat(job) == (0, 1, 0, 1)
    assert (job.master_addr, job.token, job.job_id) == ("127.0.0.1", b"", "")
    assert (job.listen_fd, job.launcher) == (None, "none")


@pytest.mark.parametrize(
    ("env", "launcher", "expected", "addr", "port"),
    [
        (TORCHRUN, "torchrun or minddp run", (5, 8, 1, 4), "10.0.0.1", 1234),
        (OPEN_MPI, "Open MPI", (1, 2, 1, 2), "127.0.0.1", 29500),
        (MPICH, "MPICH", (2, 3, 2, 3), "127.0.0.1", 29500),
        (SLURM, "Slurm", (3, 4, 1, 2), "node03", 29500),
    ],
)
def test_each_launcher_is_understood(env, launcher, expected, addr, port):
    job = from_environment(env)
    assert (job.launcher, seat(job)) == (launcher, expected)
    assert (job.master_addr, job.master_port) == (addr, port)


def test_under_slurm_the_variables_of_mpiexec_count():
    # Slurm has started one daemon on each machine, and counts those.
    job = from_environment({**SLURM, **MPICH, "SLURM_NTASKS": "2"})
    assert (job.launcher, job.rank, job.world_size) == ("MPICH", 2, 3)


def test_slurm_prefers_the_first_node_to_the_one_where_salloc_was_called():
    env = {**SLURM, "SLURM_LAUNCH_NODE_IPADDR": "10.9.9.9"}
    assert from_environment(env).master_addr == "node03"
    del env["SLURM_JOB_NODELIST"]
    assert from_environment({**env, "SLURM_NTASKS_PER_NODE": "2"}).master_addr == (
        "10.9.9.9"
    )


def test_slurm_on_one_node_meets_at_loopback():
    job = from_environment({**SLURM, "SLURM_STEP_NODELIST": "node07"})
    assert (job.master_addr, job.local_world_size) == ("127.0.0.1", 4)


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        ("a", ["a"]),
        ("a,b7", ["a", "b7"]),
        ("node[03-05,9]", ["node03", "node04", "node05", "node9"]),
        ("n[098-101]-ib,gpu", ["n098-ib", "n099-ib", "n100-ib", "n101-ib", "gpu"]),
        ("r[1-2]n[3,5]", ["r1n3", "r1n5", "r2n3", "r2n5"]),
    ],
)
def test_a_list_of_nodes_is_expanded_as_slurm_writes_it(nodes, expected):
    assert list(expand_hosts(nodes)) == expected


def test_arguments_win_over_variables():
    job = from_environment(
        TORCHRUN, rank=0, world_size=2, master_addr="::1", master_port=5
    )
    assert (job.rank, job.world_size) == (0, 2)
    assert (job.master_addr, job.master_port) == ("::1", 5)


def test_arguments_are_enough_without_a_launcher():
    job = from_environment({"MASTER_ADDR": "localhost"}, rank=1, world_size=2)
    assert seat(job) == (1, 2, 1, 2)


def test_a_loopback_address_proves_that_all_ranks_are_local():
    env = {"RANK": "1", "WORLD_SIZE": "3"}
    assert seat(from_environment({**env, "MASTER_ADDR": "[::1]"})) == (1, 3, 1, 3)
    assert seat(from_environment({**env, "MASTER_ADDR": "10.0.0.1"})) == (1, 3, 0, 1)


@pytest.mark.parametrize(
    ("changes", "in_text"),
    [
        ({"RANK": "abc"}, ["RANK=abc", "whole number", "0 to 7"]),
        ({"RANK": ""}, ["RANK=", "whole number"]),
        ({"RANK": "8"}, ["RANK=8", "0 to 7", "WORLD_SIZE=8"]),
        ({"RANK": "-1"}, ["RANK=-1", "0 to 7"]),
        ({"WORLD_SIZE": "0"}, ["WORLD_SIZE=0", "1 to 65535"]),
        ({"WORLD_SIZE": "65536"}, ["WORLD_SIZE=65536", "1 to 65535"]),
        ({"WORLD_SIZE": "2.5"}, ["WORLD_SIZE=2.5", "whole number"]),
        ({"WORLD_SIZE": None}, ["RANK=5 is set", "WORLD_SIZE is not", "minddp run"]),
        ({"RANK": None}, ["WORLD_SIZE=8 is set", "RANK is not"]),
        ({"LOCAL_RANK": "x"}, ["LOCAL_RANK=x"]),
        ({"LOCAL_RANK": "4"}, ["LOCAL_WORLD_SIZE=4", "LOCAL_RANK=4"]),
        ({"MASTER_PORT": "0"}, ["MASTER_PORT=0", "1 to 65535"]),
        ({"MASTER_PORT": "70000"}, ["MASTER_PORT=70000", "1 to 65535"]),
        ({"MASTER_PORT": "x"}, ["MASTER_PORT=x", "whole number"]),
        ({"MASTER_ADDR": ""}, ["MASTER_ADDR is empty", "10.0.0.1"]),
        ({"MASTER_ADDR": None}, ["MASTER_ADDR is not set", "4 of 8"]),
        ({"RANK": "0", "MINDDP_LISTEN_FD": "-3"}, ["MINDDP_LISTEN_FD=-3"]),
    ],
)
def test_what_cannot_be_is_named_with_its_value_and_the_remedy(changes, in_text):
    env = {k: v for k, v in {**TORCHRUN, **changes}.items() if v is not None}
    with pytest.raises(UsageError) as caught:
        from_environment(env)
    for part in in_text:
        assert part in str(caught.value)


def test_an_error_about_an_argument_names_the_argument():
    with pytest.raises(UsageError, match=r"rank=2 .*0 to 1 \(world_size=2\)"):
        from_environment({}, rank=2, world_size=2)
    with pytest.raises(UsageError, match="rank=1 is set, but WORLD_SIZE is not"):
        from_environment({}, rank=1)


def test_only_rank_0_listens_on_the_socket_that_was_handed_over():
    env = {**OPEN_MPI, "MINDDP_LISTEN_FD": "7"}
    assert from_environment(env).listen_fd is None
    assert from_environment({**env, "OMPI_COMM_WORLD_RANK": "0"}).listen_fd == 7


def test_the_token_is_in_no_text_about_the_job():
    job = from_environment({**TORCHRUN, "MINDDP_TOKEN": "geheim"})
    assert job.token == b"geheim"
    assert "geheim" not in f"{job} {job!r}"


def test_the_job_id_is_ours_before_that_of_the_launcher():
    env = {**SLURM, "TORCHELASTIC_RUN_ID": "run"}
    assert from_environment(env).job_id == "run"
    assert from_environment({**env, "MINDDP_JOB_ID": "mine"}).job_id == "mine"
    assert from_environment(SLURM).job_id == "77"


def test_torchruns_own_store_keeps_its_port():
    # Its agent listens on MASTER_PORT already: to bind it again would fail.
    env = {**TORCHRUN, "TORCHELASTIC_USE_AGENT_STORE": "True"}
    assert from_environment(env).master_port == 1235
    assert from_environment(env, master_port=1234).master_port == 1234


def test_brackets_of_an_ipv6_address_are_taken_off():
    assert [bare_address(a, "A") for a in ("[::1]", "::1", " h ")] == [
        "::1",
        "::1",
        "h",
    ]
