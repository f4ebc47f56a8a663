"""The wire format: 44 bytes in, the same header out, and nothing else is believed."""

import random
from dataclasses import replace

import pytest

from minddp.frame import (
    CONTROL_LIMIT,
    DTYPES,
    HEADER_BYTES,
    OPS,
    REDUCTIONS,
    FrameError,
    FrameReader,
    Header,
    Kind,
    control_frame,
)

CALL = Header(
    *(Kind.DATA, 17, "all_reduce", "sum", "float32"),
    *(0, 3, 1024, 4096),
)


def test_a_header_is_these_44_bytes():
    packed = CALL.pack()
    assert len(packed) == HEADER_BYTES == 44
    assert packed[:40].hex(" ") == (
        "6d 64 64 70 01 01 01 01 02 00 00 00 00 03 00 00 "
        "00 00 00 00 00 00 00 11 00 00 00 00 00 00 04 00 "
        "00 00 00 00 00 00 10 00"
    )


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_header_survives_packing(op, dtype):
    for reduce in REDUCTIONS:
        header = Header(
            *(Kind.DATA, 2**63, op, reduce, dtype),
            *(65535, -1, 2**31 + 8, 2**33),  # more than 31 bits of elements
        )
        assert Header.unpack(header.pack()) == header


@pytest.mark.parametrize("bit", range(HEADER_BYTES * 8))
def test_one_flipped_bit_is_noticed(bit):
    damaged = bytearray(CALL.pack())
    damaged[bit // 8] ^= 1 << bit % 8
    with pytest.raises(FrameError):
        Header.unpack(bytes(damaged))


def test_random_bytes_are_no_header():
    draw = random.Random(7)
    for _ in range(5_000):
        data = draw.randbytes(draw.choice([0, 1, 43, 44, 45]))
        with pytest.raises(FrameError):
            Header.unpack(data if draw.random() < 0.5 else b"mddp\x01" + data[5:])


def test_another_version_is_named():
    other = bytearray(CALL.pack())
    other[4] = 9
    with pytest.raises(FrameError, match="wire version 9, this rank speaks 1"):
        Header.unpack(bytes(other))


@pytest.mark.parametrize(
    ("header", "text"),
    [
        (CALL, "all_reduce #17 of 1,024 float32 (sum, bucket 3)"),
        (replace(CALL, bucket=-1), "all_reduce #17 of 1,024 float32 (sum)"),
        (
            replace(CALL, op="broadcast", reduce="", root=2, bucket=-1),
            "broadcast #17 of 1,024 float32 (root 2)",
        ),
        (replace(CALL, op="barrier"), "barrier #17"),
    ],
)
def test_errors_name_a_call_in_one_phrase(header, text):
    assert str(header) == text


# ---- Control frames ----

FRAMES = [
    control_frame(Kind.TABLE, [["127.0.0.1", 1], ["::1", 2]]),
    control_frame(Kind.BEAT, root=3, sequence=99),
    control_frame(Kind.ABORT, {"text": "größer"}),
]


@pytest.mark.parametrize("piece", [1, 3, 43, 44, 45, 1000])
def test_frames_come_out_whole_however_the_stream_is_cut(piece):
    stream = b"".join(FRAMES)
    reader, frames = FrameReader(), []
    for start in range(0, len(stream), piece):
        frames += reader.feed(stream[start : start + piece])
    assert [header.kind for header, _ in frames] == [
        *(Kind.TABLE, Kind.BEAT, Kind.ABORT)
    ]
    assert [content for _, content in frames] == [
        *([["127.0.0.1", 1], ["::1", 2]], None, {"text": "größer"})
    ]
    assert (frames[1][0].root, frames[1][0].sequence) == (3, 99)


def test_a_frame_that_announces_too_much_is_refused_before_its_payload_comes():
    header = Header(Kind.TABLE, nbytes=CONTROL_LIMIT + 1)
    with pytest.raises(FrameError, match=r"1,048,577 bytes"):
        FrameReader().feed(header.pack())


def test_a_frame_that_is_not_json_is_refused():
    payload = b"\x80\x04K\x01."  # a pickle
    frame = Header(Kind.ABORT, nbytes=len(payload)).pack() + payload
    with pytest.raises(FrameError, match="JSON of a ABORT frame"):
        FrameReader().feed(frame)
