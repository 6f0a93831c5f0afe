"""What each kernel must compute, in NumPy's arithmetic, to the bit: every operation of a kernel rounds once, as NumPy's do."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes
import numpy as np
from kernels import (
    CSRC,
    AdasumArguments,
    Buffer,
    FoldArguments,
    Kernels,
    PackArguments,
    Piece,
    ReduceArguments,
    Row,
)

DTYPES: dict[str, np.dtype[Any]] = {
    "bool": np.dtype(np.uint8), "u8": np.dtype(np.uint8), "i8": np.dtype(np.int8), "u16": np.dtype(np.uint16),
    "i16": np.dtype(np.int16), "i32": np.dtype(np.int32), "i64": np.dtype(np.int64), "f16": np.dtype(np.float16),
    "bf16": np.dtype(ml_dtypes.bfloat16), "f32": np.dtype(np.float32), "f64": np.dtype(np.float64),
    "bytes": np.dtype(np.uint8),
}  # fmt: skip
REDUCTIONS = re.findall(r"^  X\((\w+), \w+, (\w+)\)", (CSRC / "base/reductions.h").read_text(), re.MULTILINE)
LANES = 256


def is_float(kind: str) -> bool:
    return "f" in kind


def some(rng: np.random.Generator, kind: str, count: int) -> np.ndarray:
    """Every pattern of bits can come, so NaN, infinities, denormals, and the ends of a range."""
    dtype = DTYPES[kind]
    if kind == "bool":
        return rng.choice(np.array([0, 0, 1, 2, 4, 128, 255], dtype), count)
    made = np.frombuffer(rng.bytes(count * dtype.itemsize), dtype).copy()
    if kind in ("f32", "f64"):  # most of these should have something in common with each other
        usual = rng.random(count) < 0.9
        made[usual] = (rng.standard_normal(count) * 10.0 ** rng.integers(-3, 4, count))[usual]
    if kind == "f32":  # halfway between two of 16 bits
        bits = made.view(np.uint32)
        bits[::5], bits[1::5] = bits[::5] & 0xFFFF0000 | 0x8000, bits[1::5] & 0xFFFFE000 | 0x1000
    edges = (
        [0.0, -0.0, np.inf, -np.inf, np.nan, 1.0]
        if is_float(kind)
        else [np.iinfo(dtype).min, np.iinfo(dtype).max, 0, 1]
    )
    made[: len(edges)] = np.array(edges).astype(dtype)[:count]
    return made


def same(got: np.ndarray, want: np.ndarray, any_nan: bool = False) -> bool:
    """To the bit; a NaN is the canonical one, or any."""
    if got.dtype.kind in "fV":
        nan = np.isnan(want)
        if any_nan:
            got = np.where(np.isnan(got), np.array(np.nan, got.dtype), got)
        want = np.where(nan, np.array(np.nan, want.dtype), want).astype(got.dtype)
    return got.tobytes() == want.tobytes()


def multiplied(values: np.ndarray, factor: float) -> np.ndarray:
    """Integers: toward zero, saturated to 64 bits (NaN: 0), of which the low ones are kept."""
    if factor == 1:
        return values
    exact = values.astype(np.float64) * factor
    inside = np.abs(exact) < 2.0**63
    made = np.where(exact > 0, np.iinfo(np.int64).max, np.where(exact < 0, np.iinfo(np.int64).min, 0))
    made[inside] = np.trunc(exact[inside]).astype(np.int64)
    return made.astype(values.dtype)


def divided(values: np.ndarray, divisor: int) -> np.ndarray:
    """Toward zero, in Python's integers: of 64 bits there is no magnitude of the lowest."""
    if divisor == 1:
        return values
    return np.array(
        [abs(one) // divisor * (1 if one >= 0 else -1) for one in values.tolist()], dtype=object
    ).astype(values.dtype)


def chosen(lower: bool, acc: np.ndarray, value: np.ndarray) -> np.ndarray:
    return np.where(np.isnan(value) | ((value < acc) if lower else (value > acc)), value, acc)


COMBINE: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "Sum": lambda a, b: a + b,
    "Product": lambda a, b: a * b,
    "Min": lambda a, b: chosen(True, a, b),
    "Max": lambda a, b: chosen(False, a, b),
    "And": lambda a, b: a & b,
    "Or": lambda a, b: a | b,
    "Xor": lambda a, b: a ^ b,
}
OF_BOOLS = {"Sum": "Or", "Max": "Or", "Product": "And", "Min": "And"}


def reduced(
    kind: str, op: str, inputs: list[np.ndarray], pre: float, post: float, divisor: int
) -> np.ndarray:
    if kind == "bool":
        inputs = [(one != 0).astype(np.uint8) for one in inputs]
        op = OF_BOOLS.get(op, op)
    work = np.dtype(np.float32) if kind in ("f16", "bf16") else DTYPES[kind]
    if is_float(kind):
        inputs = [one.astype(work) * work.type(pre) for one in inputs]
    elif kind != "bool":
        inputs = [multiplied(one, pre) for one in inputs]
    acc = inputs[0]
    for value in inputs[1:]:
        acc = COMBINE[op](acc, value)
    if is_float(kind):
        return (acc * work.type(post)).astype(DTYPES[kind])
    return acc if kind == "bool" else divided(multiplied(acc, post), divisor)


# Elements, and how far each source and each destination is from 16 bytes; None: the last source is a destination.
SHAPES = (
    (0, (0, 0), (None,)), (1, (0, 0), (None, 0)), (15, (0, 0, 0), (None, 0)), (1000, (0, 0), (None, 0)),
    (9001, (0,), (None, 0)), (777, (8, 0, 0), (None, 0)), (778, (0, 8, 0), (None,)), (513, (0, 8), (None, 0)),
    (514, (0, 0), (None, 8)), (515, (0, 0), (8, 0)), (64, (0,) * 64, (None,) + (0,) * 63),
)  # fmt: skip
OF_NUMBERS = ((1.0, 1.0, 1), (0.5, 1.0, 1), (1.0, 1 / 3, 1), (1e30, 1e30, 1))
OF_INTEGERS = ((1.0, 1.0, 3), (2.5, 0.3, 2), (1e300, 1.0, 1), (float("nan"), 1.0, 1))


def check_reduce(kernels: Kernels, name: str, rng: np.random.Generator) -> Iterator[str]:
    kind = name.rpartition("_")[2]
    dtype = DTYPES[kind]
    taken = "kOfFloats" if is_float(kind) else "kOfBool" if kind == "bool" else "kOfIntegers"
    groups = {"kOfAll": 7, "kOfNumbers": 6, "kOfBits": 3, "kOfFloats": 4, "kOfIntegers": 2, "kOfBool": 1}
    scales = OF_NUMBERS[:1] if kind == "bool" else OF_NUMBERS if is_float(kind) else OF_NUMBERS + OF_INTEGERS
    for number, (op, kinds) in enumerate(REDUCTIONS):
        if not groups[kinds] & groups[taken] or op in ("Average", "Adasum"):
            continue
        for count, skips, places in SHAPES:
            sources, destinations = len(skips), len(places)
            for pre, post, divisor in scales if sources < 64 else scales[::4]:
                given = [some(rng, kind, count) for _ in skips]
                inputs = [Buffer.of(one, skip) for one, skip in zip(given, skips, strict=True)]
                outputs = [
                    inputs[-1] if skip is None else Buffer(count * dtype.itemsize, skip) for skip in places
                ]
                a = ReduceArguments(
                    count=count, pre=pre, post=post, divisor=divisor, sources=sources, destinations=destinations,
                    reduce=number, scaled=kind != "bool" and (pre, post) != (1, 1),
                )  # fmt: skip
                a.inputs[:sources], a.out[:destinations] = (
                    [one.at for one in inputs],
                    [one.at for one in outputs],
                )
                kernels.launch(
                    name,
                    a,
                    [*inputs, *(one for one in outputs if one is not inputs[-1])],
                    blocks=1 + sources % 2 * (count < 9000),
                )
                want = reduced(kind, op, given, pre, post, divisor)
                right = all(same(one.values(dtype), want) for one in outputs)
                yield (
                    ""
                    if right
                    else f"{name}: {op} of {count} elements {skips} {places}, {pre} {post} {divisor}"
                )


def packed(tensor: str, work: str, values: np.ndarray, factor: float) -> np.ndarray:
    if is_float(tensor):
        return values.astype(DTYPES[work]) * DTYPES[work].type(factor)
    return multiplied(values, factor).astype(DTYPES[work])


def unpacked(tensor: str, work: str, values: np.ndarray, factor: float, divisor: int) -> np.ndarray:
    if is_float(tensor):
        return (values * DTYPES[work].type(factor)).astype(DTYPES[tensor])
    return divided(multiplied(values.astype(DTYPES[tensor]), factor), divisor)


COUNTS = (1, 0, 7, 16, 33, 255, 1000, 4096, 5003)
SKIPS = (0, 8, 0, 0, 2, 0, 4, 0, 0)  # in elements, of each tensor's address


def check_move(kernels: Kernels, name: str, rng: np.random.Generator) -> Iterator[str]:
    """Tensors into a packed buffer with 16 bytes for each begun 16, or back."""
    _, way, *kinds = name.split("_")
    tensor, work = ("u8", "u8") if kinds == ["bytes"] else kinds
    item, wide = DTYPES[tensor].itemsize, DTYPES[work].itemsize
    scales = [(1.0, 1)]
    if kinds != ["bytes"]:
        scales += [(0.5, 1), (1 / 3, 1), (1e30, 1), (float("nan"), 1)]
        scales += [(1.0, 7), (2.5, 3)] if way == "unpack" and not is_float(tensor) else []
    launches = [(COUNTS, SKIPS, scale) for scale in scales] + [((3,) * 160, (0, 1) * 80, (1.0, 1))]
    if tensor in ("f16", "bf16"):  # every one there is, and many numbers to round
        launches.append(((65536,), (0,), (1.0, 1)))
    for counts, skips, (factor, divisor) in launches:
        places = np.cumsum([0, *(-(-count * wide // 16) for count in counts)])
        whole = Buffer(int(places[-1]) * 16)
        tensors, given = [], []
        for i, count in enumerate(counts):
            given.append(some(rng, tensor if way == "pack" else work, count))
            if count == 65536 and way == "pack":
                given[-1] = np.arange(65536, dtype=np.uint16).view(DTYPES[tensor])
            skip = skips[i] * item
            if way == "pack":
                tensors.append(Buffer.of(given[-1], skip))
            else:
                tensors.append(Buffer(count * item, skip))
                whole.bytes[places[i] * 16 :][: count * wide] = np.frombuffer(given[-1].tobytes(), np.uint8)
        a = PackArguments(packed=whole.at, factor=factor, divisor=divisor)
        a.piece[: len(counts)] = [
            Piece(one.at, count, place) for one, count, place in zip(tensors, counts, places, strict=False)
        ]
        before = whole.bytes.copy()
        kernels.launch(name, a, [*tensors, whole], blocks=1 + (factor != 1), rows=len(counts))
        for i, count in enumerate(counts):
            if way == "pack":
                got, want = (
                    whole.values(DTYPES[work], places[i] * 16, count),
                    packed(tensor, work, given[i], factor),
                )
                before[places[i] * 16 :][: count * wide] = whole.bytes[places[i] * 16 :][: count * wide]
            else:
                got, want = (
                    tensors[i].values(DTYPES[tensor]),
                    unpacked(tensor, work, given[i], factor, divisor),
                )
            canonical = way == "unpack" and tensor in ("f16", "bf16")
            yield "" if same(got, want, not canonical) else f"{name}: {count} elements, {factor} {divisor}"
        yield "" if (before == whole.bytes).all() else f"{name}: the packed buffer beside its pieces"


# Elements, and how far the two vectors are from 16 bytes.
ROWS = ((0, 0, 0), (1, 0, 0), (1023, 0, 0), (5000, 0, 0), (777, 8, 0), (300, 0, 8))


def adasum_rows(
    kind: str, rng: np.random.Generator, whole: bool
) -> tuple[list[np.ndarray], list[np.ndarray], list[Buffer]]:
    """Pairs of vectors; whole numbers have sums that no order changes."""
    dtype = DTYPES[kind]
    a, b, buffers = [], [], []
    for count, *skips in ROWS:
        for vectors, skip in zip((a, b), skips, strict=True):
            vectors.append(
                (rng.integers(-99, 99, count) if whole else rng.standard_normal(count)).astype(dtype)
            )
            buffers.append(Buffer.of(vectors[-1], skip))
    return a, b, buffers


def check_products(kernels: Kernels, name: str, rng: np.random.Generator) -> Iterator[str]:
    for whole in (True, False):
        a, b, buffers = adasum_rows(name[-3:], rng, whole)
        lines = Buffer(len(ROWS) * 3 * LANES * 8)
        given = AdasumArguments(sums=lines.at)
        for i, (count, *_) in enumerate(ROWS):  # lines in another order than rows
            given.row[i] = Row(buffers[2 * i].at, buffers[2 * i + 1].at, count, len(ROWS) - 1 - i)
        kernels.launch(name, given, [*buffers, lines], blocks=1, rows=len(ROWS))
        got = lines.values(np.float64).reshape(len(ROWS), 3, LANES)[::-1]
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            x, y = x.astype(np.float64), y.astype(np.float64)
            want = np.array([x @ x, x @ y, y @ y])
            near = np.abs(got[i].sum(1) - want) <= (0 if whole else 1e-13 * len(x))
            # No lane has more than its share: the sums can be done in parallel.
            busy = np.count_nonzero(got[i][0]) >= min(LANES, len(x) // (32 // x.itemsize)) * (
                0.5 if whole else 1
            )
            yield "" if near.all() and busy else f"{name}: {len(x)} elements"


def check_fold(kernels: Kernels, name: str, rng: np.random.Generator) -> Iterator[str]:
    for lanes_in, lanes_out, sums in (
        (256, 32, [(0, 1), (1, 3), (4, 0)]),
        (32, 1, [(0, 4)]),
        (1, 1, [(2, 2)] * 500),
    ):
        values = rng.standard_normal((4, 3, lanes_in))
        lines, made = Buffer.of(values), Buffer(len(sums) * 3 * lanes_out * 8)
        given = FoldArguments(from_=lines.at, to=made.at, lanes_in=lanes_in, lanes_out=lanes_out)
        for i, pair in enumerate(sums):
            given.lines[i][:] = pair
        kernels.launch(name, given, [lines, made], blocks=-(-3 * lanes_out // 256), rows=len(sums))
        got = made.values(np.float64).reshape(len(sums), 3, lanes_out)
        for i, (first, count) in enumerate(sums):
            want = np.zeros((3, lanes_out))
            for line in values[first : first + count]:
                for lane in range(0, lanes_in, lanes_out):
                    want += line[:, lane : lane + lanes_out]
            yield (
                "" if same(got[i], want) else f"{name}: {lanes_in} to {lanes_out}, {count} lines from {first}"
            )


def check_combine(kernels: Kernels, name: str, rng: np.random.Generator) -> Iterator[str]:
    a, b, buffers = adasum_rows(name[-3:], rng, False)
    norms = rng.random((len(ROWS), 3)) + 0.5
    norms[1, 0], norms[2, 2], norms[3, 1] = 0, 0, np.nan
    sums = Buffer.of(norms)
    given = AdasumArguments(sums=sums.at)
    for i, (count, *_) in enumerate(ROWS):
        given.row[i] = Row(buffers[2 * i].at, buffers[2 * i + 1].at, count, len(ROWS) - 1 - i)
    kernels.launch(name, given, [*buffers, sums], blocks=1, rows=len(ROWS))
    for i, (aa, ab, bb) in enumerate(norms[::-1]):
        of_a = 1 - ab / (2 * aa) if aa else 1.0
        of_b = 1 - ab / (2 * bb) if bb else 1.0
        want = (of_a * a[i].astype(np.float64) + of_b * b[i].astype(np.float64)).astype(a[i].dtype)
        right = same(buffers[2 * i].values(want.dtype), want, any_nan=True)
        unchanged = same(buffers[2 * i + 1].values(want.dtype), b[i])
        yield "" if right and unchanged else f"{name}: row {i}"


CHECKS = {
    "hc_reduce_": check_reduce, "hc_pack_": check_move, "hc_unpack_": check_move, "hc_adasum_products_": check_products,
    "hc_adasum_combine_": check_combine, "hc_adasum_fold": check_fold,
}  # fmt: skip


def differences(kernels: Kernels, name: str) -> tuple[int, list[str]]:
    """How many results were compared, and which of them differ."""
    check = next(one for start, one in CHECKS.items() if name.startswith(start))
    with np.errstate(all="ignore"):
        results = list(check(kernels, name, np.random.default_rng(38)))
    return len(results), [one for one in results if one]
