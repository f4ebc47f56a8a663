"""The ring: plans first, then ranks as threads over unreliable queues in memory."""

import threading
import time

import numpy as np
import pytest

from minddp import combine, ring
from minddp.errors import PeerError, PeerLost, PeerMismatch, PeerTimeout
from minddp.frame import HEADER_BYTES, Header, Kind
from minddp.net import Deadline
from minddp.testing import run_ranks

WORLDS = [2, 3, 4, 5]
DTYPES = [
    *(np.float16, np.float32, np.float64, np.int8, np.int16, np.int32, np.int64),
    np.uint8,
]


def call(op, x, reduce="sum", root=0, sequence=1):
    return Header(
        *(Kind.DATA, sequence, op, reduce, x.dtype.name, root, -1, x.size, x.nbytes)
    )


def perform(links, op, x, reduce="sum", root=0, seconds=5.0):
    """One collective on this rank's x, in place; `op` may end in _stepwise."""
    header = call(op.removesuffix("_stepwise"), x, reduce, root)
    getattr(ring, op)(links, x, header, Deadline(seconds))
    return x


def sizes(n):
    """Empty, fewer elements than ranks, as many, one more, and many."""
    return sorted({0, 1, n - 1, n, n + 1, 10, 1000})


def revealing(r, length, dtype=np.float64):
    """Element i of rank r is 100 r + i: it tells where it came from."""
    return (100 * r + np.arange(length)).astype(dtype)


def on_revealing_arrays(n, op, length, **settings):
    """What each rank has after a collective on `revealing` arrays."""

    def body(links):
        return perform(links, op, revealing(links.rank, length), **settings)

    return run_ranks(n, body)


@pytest.fixture
def in_chunks(monkeypatch):
    """However small an array is, its chunks travel, in short segments."""
    monkeypatch.setattr(ring, "SEGMENT_BYTES", 64)
    monkeypatch.setattr(ring, "WHOLE_BYTES", 0)


@pytest.fixture(params=["in chunks", "whole"])
def either_way(request, monkeypatch):
    """Both algorithms of all_reduce."""
    monkeypatch.setattr(ring, "SEGMENT_BYTES", 64)
    monkeypatch.setattr(ring, "WHOLE_BYTES", 10_000 * (request.param == "whole"))


# ---- Plans ----


def test_chunks_of_ten_elements_for_four_ranks():
    assert [ring.chunk(10, 4, k) for k in range(4)] == [
        *(slice(0, 3), slice(3, 6), slice(6, 8), slice(8, 10))
    ]


@pytest.mark.parametrize("n", range(1, 8))
@pytest.mark.parametrize("length", [0, 1, 2, 5, 6, 7, 8, 100])
def test_chunks_cover_the_array_without_gap_or_overlap(n, length):
    covered = [i for k in range(n) for i in range(length)[ring.chunk(length, n, k)]]
    assert covered == list(range(length))
    lengths = [len(range(length)[ring.chunk(length, n, k)]) for k in range(n)]
    assert max(lengths) - min(lengths) <= 1


def test_segments_cut_a_chunk_into_pieces_of_the_segment_size(monkeypatch):
    monkeypatch.setattr(ring, "SEGMENT_BYTES", 16)
    pieces = list(ring.segments(slice(3, 12), itemsize=4))
    assert pieces == [slice(3, 7), slice(7, 11), slice(11, 12)]
    assert list(ring.segments(slice(3, 3), itemsize=4)) == []


def test_what_rank_0_of_4_receives_in_each_step(in_chunks):
    x = np.zeros(10, np.float32)
    assert ring.arrivals(call("all_reduce", x), 0, 4) == [8, 12, 12, 8, 8, 12]
    assert ring.arrivals(call("reduce_scatter", x), 0, 4) == [8, 12, 12]
    assert ring.arrivals(call("all_gather", x), 0, 4) == [8, 8, 12]
    assert ring.arrivals(call("broadcast", x, root=0), 0, 4) == []
    assert ring.arrivals(call("broadcast", x, root=1), 0, 4) == [40]


def test_a_small_array_comes_whole_in_half_as_many_steps():
    x = np.zeros(ring.STEP_BYTES // 4 * 2 + 1, np.float32)  # 4 ranks: half is overhead
    small = call("all_reduce", x[1:])
    assert ring.arrivals(small, 0, 4) == [2 * ring.STEP_BYTES] * 3
    assert len(ring.arrivals(call("all_reduce", x), 0, 4)) == 6
    assert len(ring.arrivals(small, 0, 8)) == 14, "there 3/4 are"
    x = np.zeros(ring.WHOLE_BYTES // 4 + 1, np.float32)  # 2 ranks: none is
    assert ring.arrivals(call("all_reduce", x[1:]), 1, 2) == [ring.WHOLE_BYTES]
    assert len(ring.arrivals(call("all_reduce", x), 1, 2)) == 2
    assert ring.arrivals(call("barrier", np.ones(1, np.uint8)), 2, 5) == [1] * 4
    assert len(ring.arrivals(call("reduce_scatter", x[1:9]), 0, 4)) == 3


# ---- Who owns what ----


@pytest.mark.parametrize("op", ["reduce_scatter", "reduce_scatter_stepwise"])
def test_after_reduce_scatter_rank_r_owns_chunk_r(op):
    #              chunk 0  chunk 1  chunk 2
    x = [
        np.array([1.0, 1.0, 1.0]),  # rank 0 contributes ones,
        np.array([10.0, 20.0, 30.0]),  # rank 1 tens,
        np.array([100.0, 300.0, 500.0]),
    ]  # rank 2 hundreds: a lost or doubled

    # contribution shows in its own digit
    def body(links):
        return perform(links, op, x[links.rank])[links.rank]

    assert run_ranks(3, body) == [111, 321, 531]


@pytest.mark.parametrize("op", ["all_gather", "all_gather_stepwise"])
@pytest.mark.parametrize("n", WORLDS)
def test_all_gather_brings_chunk_k_of_rank_k_to_everyone(op, n, in_chunks):
    for length in sizes(n):
        expected = np.concatenate(
            [revealing(k, length)[ring.chunk(length, n, k)] for k in range(n)]
        )
        for x in on_revealing_arrays(n, op, length):
            assert x.tolist() == expected.tolist()


@pytest.mark.parametrize("op", ["all_reduce", "all_reduce_stepwise"])
@pytest.mark.parametrize("n", WORLDS)
def test_all_reduce_sums_arrays_of_any_length(op, n, either_way):
    for length in sizes(n):
        expected = sum(revealing(r, length) for r in range(n))
        for x in on_revealing_arrays(n, op, length):
            assert x.tolist() == expected.tolist()


@pytest.mark.parametrize("root", range(4))
def test_broadcast_gives_everyone_the_roots_array(root, in_chunks):
    for length in sizes(4):
        for x in on_revealing_arrays(4, "broadcast", length, root=root):
            assert x.tolist() == revealing(root, length).tolist()


@pytest.mark.parametrize("n", WORLDS)
def test_nobody_leaves_a_barrier_before_the_last_has_entered(n, either_way):
    entered = []

    def body(links):
        time.sleep(0.02 * (links.rank == n - 1))
        entered.append(links.rank)
        perform(links, "barrier", np.ones(1, np.uint8))
        return len(entered)

    assert run_ranks(n, body) == [n] * n


# ---- Bits ----


def in_ring_order(arrays, reduce=np.add):
    """The reduction in the order in which the ring makes it: k+1, k+2, ..., k."""
    n, expected = len(arrays), np.empty_like(arrays[0])
    for k in range(n):
        part = ring.chunk(len(expected), n, k)
        total = arrays[(k + 1) % n][part]
        for i in range(2, n + 1):
            total = reduce(total, arrays[(k + i) % n][part])
        expected[part] = total
    return expected


def random_arrays(n, length, dtype=np.float32):
    draw = np.random.default_rng(n)
    return [
        (draw.standard_normal(length) * 10.0 ** draw.integers(-6, 6, length)).astype(
            dtype
        )
        for _ in range(n)
    ]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # float16 overflows on purpose
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("n", WORLDS)
def test_sums_have_the_bits_of_the_rotated_order_on_all_ranks(n, dtype, either_way):
    arrays = random_arrays(n, 501, dtype)
    expected = in_ring_order(arrays)
    for x in run_ranks(
        n, lambda links: perform(links, "all_reduce", arrays[links.rank].copy())
    ):
        assert x.tobytes() == expected.tobytes()


def test_with_two_ranks_the_bits_are_those_of_x0_plus_x1(either_way):
    x0, x1 = random_arrays(2, 501)
    for x in run_ranks(
        2, lambda links: perform(links, "all_reduce", [x0, x1][links.rank].copy())
    ):
        assert x.tobytes() == (x0 + x1).tobytes()


@pytest.mark.parametrize("n", WORLDS)
def test_the_pipelined_ring_gives_the_bits_of_the_stepwise_one(n, either_way):
    arrays = random_arrays(n, 333)

    def body(links):
        ours, oracle = arrays[links.rank].copy(), arrays[links.rank].copy()
        perform(links, "all_reduce", ours, "avg")
        perform(links, "all_reduce_stepwise", oracle, "avg")
        return ours.tobytes() == oracle.tobytes()

    assert all(run_ranks(n, body))


@pytest.mark.parametrize("reduce", ["sum", "prod", "min", "max"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_reduction_of_every_dtype(reduce, dtype, either_way):
    arrays = [np.array([1, 2, 3, 4, 5]).astype(dtype) + dtype(r) for r in range(3)]
    expected = in_ring_order(arrays, combine.COMBINE[reduce])
    for x in run_ranks(
        3, lambda links: perform(links, "all_reduce", arrays[links.rank].copy(), reduce)
    ):
        assert x.dtype == dtype
        assert x.tolist() == expected.tolist()


def test_an_average_is_divided_exactly_once(either_way):
    for x in run_ranks(
        4,
        lambda links: perform(
            links, "all_reduce", np.full(100, 4.0 * links.rank), "avg"
        ),
    ):
        assert x.tolist() == [6.0] * 100


@pytest.mark.filterwarnings("ignore:overflow")
def test_float16_overflows_alike_on_all_ranks():
    for x in run_ranks(
        2, lambda links: perform(links, "all_reduce", np.full(3, 60000, np.float16))
    ):
        assert x.tolist() == [np.inf] * 3


# ---- Bytes ----


@pytest.mark.parametrize("n", WORLDS)
def test_an_all_reduce_sends_2_n_minus_1_nths_of_the_bytes(n, in_chunks):
    length = 4 * 3 * 5 * 7  # divisible by every n here

    def body(links):
        x = perform(links, "all_reduce", np.zeros(length, np.float32))
        return links.bytes_sent - HEADER_BYTES, links.bytes_received - HEADER_BYTES, x

    for sent, received, x in run_ranks(n, body):
        assert sent == received == 2 * (n - 1) * x.nbytes // n


@pytest.mark.parametrize(
    "op", ["all_reduce", "reduce_scatter", "all_gather", "broadcast"]
)
def test_the_bytes_on_the_wire_are_those_of_the_plan(op, either_way):
    for n in WORLDS:
        for length in sizes(n):
            header = call(op, np.zeros(length), root=1)

            def body(links, op=op, length=length):
                perform(links, op, np.zeros(length), root=1)
                return links.bytes_sent, links.bytes_received

            for r, (sent, received) in enumerate(run_ranks(n, body)):
                right = (r + 1) % n
                assert received == HEADER_BYTES + sum(ring.arrivals(header, r, n))
                assert sent == HEADER_BYTES + sum(ring.arrivals(header, right, n))


@pytest.mark.parametrize("seed", range(10))
def test_short_reads_and_delays_change_nothing(seed, either_way):
    for x in run_ranks(
        3,
        lambda links: perform(links, "all_reduce", revealing(links.rank, 200)),
        seed=seed,
        capacity=7,
    ):
        assert x.tolist() == [300 + 3 * i for i in range(200)]


def test_a_buffer_list_loses_exactly_the_bytes_that_were_sent():
    ready = ring.deque([b"abc", b"defg", b"h"])
    ring.drop_sent(ready, 5)
    assert [bytes(buffer) for buffer in ready] == [b"fg", b"h"]
    ring.drop_sent(ready, 3)
    assert not ready


# ---- Failures ----


@pytest.mark.parametrize("cut_after", [0, 1, HEADER_BYTES, 100, 400, 600])
def test_behind_a_broken_link_its_sender_is_named(cut_after, either_way):
    with pytest.raises(PeerError) as caught:
        run_ranks(
            3,
            lambda links: perform(links, "all_reduce", np.ones(100)),
            cut={1: cut_after},
        )
    of_ranks = caught.value.of_ranks
    assert isinstance(of_ranks[2], PeerLost)
    assert "its left neighbour" in str(of_ranks[2])
    assert "during all_reduce #1 of 100 float64 (sum), step" in str(of_ranks[2])
    assert of_ranks[2].culprit == 1


def test_an_error_says_how_far_the_collective_came(in_chunks):
    with pytest.raises(PeerError) as caught:
        run_ranks(
            2,
            lambda links: perform(links, "all_reduce", np.ones(100)),
            cut={0: HEADER_BYTES + 500},
        )
    # 400 bytes of the first chunk and 100 of the second had come.
    assert "step 2 of 2, after 500 of 800 bytes: connection closed" in str(
        caught.value.of_ranks[1]
    )


@pytest.mark.parametrize(
    "odd",
    [
        {"x": np.ones(101)},
        {"x": np.ones(100, np.float32)},
        {"reduce": "max"},
        {"op": "all_gather"},
        {"op": "broadcast", "root": 1},
    ],
)
def test_a_rank_in_another_call_is_found_before_any_array_changes(odd):
    mine = {}

    def body(links):
        ours = {"op": "all_reduce", "x": np.ones(100)}
        theirs = ours | odd if links.rank == 1 else ours
        mine[links.rank] = theirs["x"] = theirs["x"].copy()
        perform(links, **theirs)

    with pytest.raises(PeerError) as caught:
        run_ranks(2, body)
    assert any(isinstance(error, PeerMismatch) for error in caught.value.of_ranks)
    assert all((x == 1).all() for x in mine.values())


def test_a_rank_that_never_comes_is_a_timeout_that_names_it():
    stay = threading.Event()

    def body(links):
        if links.rank == 1:
            stay.wait(10)
            return
        try:
            perform(links, "all_reduce", np.ones(100), seconds=0.2)
        finally:
            stay.set()

    with pytest.raises(PeerTimeout) as caught:
        run_ranks(2, body)
    assert caught.value.culprit == 1
    assert "rank 0 waits in vain for rank 1" in str(caught.value)
    assert "no byte moved for 0.2 s" in str(caught.value)


def test_a_deadline_counts_from_the_last_byte_that_moved():
    """Slow is not dead: four times the deadline, but never that long without a byte."""

    def body(links):
        if links.rank == 1:
            original = links.send_some

            def slowly(buffers):
                time.sleep(0.02)
                return original([memoryview(next(iter(buffers)))[:40]])

            links.send_some = slowly
        return perform(links, "all_reduce", np.ones(100), seconds=0.2)

    start = time.monotonic()
    for x in run_ranks(2, body, capacity=4096):
        assert x.tolist() == [2.0] * 100
    assert time.monotonic() - start > 0.2, "else the test has shown nothing"
