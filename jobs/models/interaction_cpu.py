"""The dot interaction as a numba kernel that XLA calls from within a compiled program.

XLA hands a C function of its foreign function interface one argument, the address of a call frame
(`xla/ffi/api/c_api.h`, which jaxlib ships). A numba callback can be that function: it reads the addresses of the
buffers from the frame. The places used below are those of versions 0.3 and 0.5 of the interface; with any other this
module says that it is not available.

Threads: the one that XLA calls from, and those of the thread pool that XLA gives to its kernels. They take blocks of
samples from one counter until none is left. The caller then waits for blocks that others have begun. It never waits for
a thread that has not come yet: that one finds no block left and touches nothing but the counter. Each sample is one
thread's, so results have the same bytes with any number of threads.
"""

from __future__ import annotations

import ctypes
import re
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from llvmlite import ir
from llvmlite.binding import add_symbol
from numba import cfunc, types
from numba.core.cgutils import get_or_insert_function

from podembed.embedding.kernels.arrays import CACHE_LINE_BYTES
from podembed.embedding.kernels.row_vectors import (
    SOURCE_STAMP,
    WidthType,
    columns_of,
    intrinsic,
    jit,
    load,
    load_float,
    multiply_add,
    prefetch_to_read,
    publish,
    splat,
    store,
    store_float,
    store_streaming,
    total,
    width_of,
)

# Versions of the interface in which what is read here lies at the same places. The first one is what XLA is told.
SUPPORTED_VERSIONS = ((0, 3), (0, 5))
# Places in the frame, in 8-byte words.
_EXTENSION, _NUM_ARGUMENTS, _ARGUMENTS, _RESULTS = 1, 7, 9, 14
_EXTENSION_TYPE, _EXTENSION_METADATA, _METADATA_TYPE = 1, 3, 1
_METADATA_VERSION, _METADATA_TRAITS = 3, 4
_BUFFER_DATA, _BUFFER_DIMENSIONS = 3, 5
_SAMPLES_AHEAD = 3
# Places in the frame, in the table of functions that it leads to, and sizes of the arguments of two of them.
_API, _CONTEXT, _SCHEDULE, _NUM_THREADS = 2, 3, 17, 18
_SCHEDULE_BYTES, _NUM_THREADS_BYTES = 40, 32
# Samples that a thread takes at a time; some 50 microseconds of work for 27 vectors of 128 numbers.
_BLOCK = 32
# Places in what threads share: the counters of blocks taken and done, who may still look here, the frame, its samples.
_TAKEN, _DONE, _HOLDERS, _FRAME, _SAMPLES, _SHARED_WORDS = 0, 1, 2, 3, 4, 5
_WORD = ir.IntType(64)


@cache
def is_available() -> bool:
    """Whether this jaxlib has a version of the interface that the kernel is written for."""
    header = Path(jax.ffi.include_dir()) / "xla" / "ffi" / "api" / "c_api.h"
    if not header.exists():
        return False
    text = header.read_text(encoding="utf-8")
    found = [re.search(rf"#define XLA_FFI_API_{part} (\d+)", text) for part in ("MAJOR", "MINOR")]
    return tuple(int(match.group(1)) if match else -1 for match in found) in SUPPORTED_VERSIONS


@intrinsic
def _word(typing_context, address, place):
    """The 8-byte word at `address + 8 * place`."""

    def generate(context, builder, sig, args):
        at = builder.add(args[0], builder.shl(args[1], _WORD(3)))
        return builder.load(builder.inttoptr(at, _WORD.as_pointer()))

    return types.int64(types.int64, types.int64), generate


@intrinsic
def _set_word(typing_context, address, place, value):
    def generate(context, builder, sig, args):
        at = builder.add(args[0], builder.shl(args[1], _WORD(3)))
        builder.store(args[2], builder.inttoptr(at, _WORD.as_pointer()))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate


@intrinsic
def _add(typing_context, address, place, amount):
    """Adds to a word that several threads count in. Returns what it was."""

    def generate(context, builder, sig, args):
        at = builder.add(args[0], builder.shl(args[1], _WORD(3)))
        return builder.atomic_rmw("add", builder.inttoptr(at, _WORD.as_pointer()), args[2], "seq_cst")

    return types.int64(types.int64, types.int64, types.int64), generate


@intrinsic
def _call(typing_context, function, argument):
    """Calls a C function of one word."""

    def generate(context, builder, sig, args):
        pointer = builder.inttoptr(args[0], ir.FunctionType(_WORD, [_WORD]).as_pointer())
        return builder.call(pointer, [args[1]])

    return types.int64(types.int64, types.int64), generate


def _of_the_c_library(name: str, *parameters: Any) -> Any:
    @intrinsic
    def call(typing_context, argument):
        def generate(context, builder, sig, args):
            kind = ir.FunctionType(_WORD, list(parameters))
            return builder.call(get_or_insert_function(builder.module, kind, name), args[: len(parameters)])

        return types.int64(types.int64), generate

    return call


_allocate, _free, _yield = (
    _of_the_c_library("malloc", _WORD),
    _of_the_c_library("free", _WORD),
    _of_the_c_library("sched_yield"),
)


@jit
def _num_threads(frame):
    """Threads of XLA's pool; 1 where it has none for us."""
    found, arguments = _on_stack(8), _on_stack(_NUM_THREADS_BYTES)
    _set_word(found, 0, 1)
    _set_word(arguments, 0, _NUM_THREADS_BYTES)
    _set_word(arguments, 1, 0)
    _set_word(arguments, 2, _word(frame, _CONTEXT))
    _set_word(arguments, 3, found)
    if _call(_word(_word(frame, _API), _NUM_THREADS), arguments) != 0:
        return 1
    return _word(found, 0)


@jit
def _schedule(frame, task, shared):
    """Asks the pool to call `task(shared)`. Returns whether it will."""
    arguments = _on_stack(_SCHEDULE_BYTES)
    _set_word(arguments, 0, _SCHEDULE_BYTES)
    _set_word(arguments, 1, 0)
    _set_word(arguments, 2, _word(frame, _CONTEXT))
    _set_word(arguments, 3, task)
    _set_word(arguments, 4, shared)
    return _call(_word(_word(frame, _API), _SCHEDULE), arguments) == 0


@jit
def _let_go(shared):
    if _add(shared, _HOLDERS, -1) == 1:
        _free(shared)


@jit
def _answers_metadata(frame):
    """Before the first call XLA asks which version the function is for; True if that was it."""
    extension = _word(frame, _EXTENSION)
    if extension == 0 or (_word(extension, _EXTENSION_TYPE) & 0xFFFFFFFF) != _METADATA_TYPE:
        return False
    metadata = _word(extension, _EXTENSION_METADATA)
    _set_word(metadata, _METADATA_VERSION, SUPPORTED_VERSIONS[0][0] | (SUPPORTED_VERSIONS[0][1] << 32))
    _set_word(metadata, _METADATA_TRAITS, 0)
    return True


@jit
def _data(frame, which, number):
    return _word(_word(_word(frame, which), number), _BUFFER_DATA)


@jit
def _num_samples(frame):
    return _word(_word(_word(_word(frame, _ARGUMENTS), 0), _BUFFER_DIMENSIONS), 0)


@intrinsic
def _on_stack(typing_context, num_bytes):
    """Address of memory, aligned to a cache line, that goes when the kernel returns."""

    def generate(context, builder, sig, args):
        memory = builder.alloca(ir.IntType(8), args[0])
        memory.align = CACHE_LINE_BYTES
        return builder.ptrtoint(memory, _WORD)

    return types.int64(types.int64), generate


@jit
def _bring_together(width, dim, frame, num_vectors, sample, num_samples, out):
    """Copies a sample's vectors to rows of `out`. Where they lie they are as far apart as the batch is long. Their
    addresses often share a few cache sets and push each other out.
    """
    for i in range(num_vectors):
        vector = (_data(frame, _ARGUMENTS, i), np.int64(4 * dim))
        for column in range(0, dim, columns_of(width)):
            prefetch_to_read(width, vector, min(sample + _SAMPLES_AHEAD, num_samples - 1), column)
            store(out, i, column, load(width, vector, sample, column))


@jit
def _forward(width, dim, frame, first, stop):
    """Arguments: F vectors `[n, dim]`. Result: `[n, dim + pairs]`. Of samples `first` to `stop - 1`."""
    num_vectors, num_samples = _word(frame, _NUM_ARGUMENTS), _num_samples(frame)
    step, stride = columns_of(width), np.int64(4 * dim)
    out_stride = 4 * (dim + num_vectors * (num_vectors - 1) // 2)
    out = _data(frame, _RESULTS, 0)
    vectors = (_on_stack(num_vectors * stride), stride)
    for sample in range(first, stop):
        _bring_together(width, dim, frame, num_vectors, sample, num_samples, vectors)
        row = (out + sample * out_stride, np.int64(4))
        for column in range(0, dim, step):
            store(row, 0, column, load(width, vectors, 0, column))
        at = dim
        for i in range(1, num_vectors):
            left = load(width, vectors, i, 0)
            for j in range(i):
                product = total(left * load(width, vectors, j, 0))
                for column in range(step, dim, step):
                    product += total(load(width, vectors, i, column) * load(width, vectors, j, column))
                store_float(row, at, product)
                at += 1


@jit
def _backward(width, dim, frame, first, stop):
    """Arguments: F vectors `[n, dim]`, then the gradient `[n, dim + pairs]`. Results: the gradients of the vectors. Of
    samples `first` to `stop - 1`.
    """
    num_vectors, num_samples = _word(frame, _NUM_ARGUMENTS) - 1, _num_samples(frame)
    step, stride = columns_of(width), np.int64(4 * dim)
    gradient_stride = 4 * (dim + num_vectors * (num_vectors - 1) // 2)
    gradient = _data(frame, _ARGUMENTS, num_vectors)
    vectors = (_on_stack(num_vectors * stride), stride)
    for sample in range(first, stop):
        _bring_together(width, dim, frame, num_vectors, sample, num_samples, vectors)
        upstream = (gradient + sample * gradient_stride, np.int64(4))
        for i in range(num_vectors):
            out = (_data(frame, _RESULTS, i), stride)
            for column in range(0, dim, step):
                result = splat(width, np.float32(0.0))
                if i == 0:
                    result = load(width, upstream, 0, column)
                at = dim + i * (i - 1) // 2
                for j in range(i):
                    weight = splat(width, load_float(upstream, at + j))
                    result = multiply_add(weight, load(width, vectors, j, column), result)
                at = dim + i * (i + 1) // 2 + i
                for j in range(i + 1, num_vectors):
                    weight = splat(width, load_float(upstream, at))
                    result = multiply_add(weight, load(width, vectors, j, column), result)
                    at += j
                # Results are read much later, by the copy to the host; XLA aligns them to cache lines.
                if dim % 16 == 0:
                    store_streaming(out, sample, column, result)
                else:
                    store(out, sample, column, result)
    publish()


@intrinsic
def _literal_width(typing_context, columns):
    """A `Width` from a number that the compiler knows."""
    width = WidthType(columns.literal_value) if isinstance(columns, types.IntegerLiteral) else None
    return width and (width(columns), lambda context, builder, sig, args: context.get_dummy_value())


@intrinsic
def _helper(typing_context, dim, is_backward):
    """The address of what `_handler` makes for another thread. A name that is looked up when code is loaded: numba
    keeps no code that has an address in it.
    """
    if not (isinstance(dim, types.IntegerLiteral) and isinstance(is_backward, types.IntegerLiteral)):
        return None
    name = _helper_name(dim.literal_value, is_backward.literal_value)

    def generate(context, builder, sig, args):
        kind = ir.FunctionType(ir.VoidType(), [_WORD])
        return builder.ptrtoint(get_or_insert_function(builder.module, kind, name), _WORD)

    return types.int64(dim, is_backward), generate


def _helper_name(dim: int, is_backward: int) -> str:
    return f"podembed_interaction_{'gradient_' if is_backward else ''}help_{dim}"


@jit
def _run(width, dim, is_backward, frame, first, stop):
    if is_backward:
        _backward(width, dim, frame, first, stop)
    else:
        _forward(width, dim, frame, first, stop)


@jit
def _take_blocks(width, dim, is_backward, shared):
    num_samples = _word(shared, _SAMPLES)
    while True:
        first = _add(shared, _TAKEN, 1) * _BLOCK
        if first >= num_samples:
            break
        _run(width, dim, is_backward, _word(shared, _FRAME), first, min(first + _BLOCK, num_samples))
        _add(shared, _DONE, 1)


# XLA keeps the addresses only; without this the compiled functions would go.
_kept: list[Any] = []


def _handler(dim: int, is_backward: int) -> Any:
    """What XLA calls: runs a kernel over all samples of a frame, by as many threads as it may.

    Numba keeps a function that another one encloses by the values that it takes from there, so they are numbers. Among
    them is what the code of the kernels is known by.
    """
    columns, stamp = width_of(dim).columns, SOURCE_STAMP

    @cfunc(types.void(types.int64), cache=True)
    def help(shared):
        _ = stamp
        _take_blocks(_literal_width(columns), dim, is_backward, shared)
        _let_go(shared)

    add_symbol(_helper_name(dim, is_backward), help.address)

    @cfunc(types.int64(types.int64), cache=True)
    def handler(frame):
        _ = stamp
        if _answers_metadata(frame):
            return 0
        num_samples = _num_samples(frame)
        num_blocks = (num_samples + _BLOCK - 1) // _BLOCK
        num_helpers = min(_num_threads(frame), num_blocks) - 1
        if num_helpers < 1:
            _run(_literal_width(columns), dim, is_backward, frame, 0, num_samples)
            return 0
        shared = _allocate(8 * _SHARED_WORDS)
        _set_word(shared, _TAKEN, 0)
        _set_word(shared, _DONE, 0)
        _set_word(shared, _HOLDERS, 1 + num_helpers)
        _set_word(shared, _FRAME, frame)
        _set_word(shared, _SAMPLES, num_samples)
        for _ in range(num_helpers):
            if not _schedule(frame, _helper(dim, is_backward), shared):
                _let_go(shared)
        _take_blocks(_literal_width(columns), dim, is_backward, shared)
        while _add(shared, _DONE, 0) < num_blocks:
            _yield(0)
        _let_go(shared)
        return 0

    _kept.extend((help, handler))
    return handler


@cache
def _targets(dim: int) -> tuple[str, str]:
    """Compiles and registers both directions for one width; their names."""
    names = (f"podembed_interaction_{dim}", f"podembed_interaction_gradient_{dim}")
    for is_backward, name in enumerate(names):
        jax.ffi.register_ffi_target(name, _capsule(_handler(dim, is_backward)), platform="cpu")
    return names


def _capsule(function: Any) -> Any:
    create = ctypes.pythonapi.PyCapsule_New
    create.restype, create.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    return create(function.address, None, None)


@jax.custom_vjp
def with_products(*vectors: jax.Array) -> jax.Array:
    """As `jobs.models.interaction.with_products`, on a CPU."""
    num_samples, dim = vectors[0].shape
    columns = dim + len(vectors) * (len(vectors) - 1) // 2
    result = jax.ShapeDtypeStruct((num_samples, columns), jnp.float32)
    call = jax.ffi.ffi_call(_targets(dim)[0], result, vmap_method="sequential")
    return call(*vectors)


def _with_products_forward(*vectors: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    return with_products(*vectors), vectors


def _with_products_backward(vectors: tuple[jax.Array, ...], upstream: jax.Array) -> tuple[jax.Array, ...]:
    shapes = [jax.ShapeDtypeStruct(vector.shape, jnp.float32) for vector in vectors]
    call = jax.ffi.ffi_call(_targets(vectors[0].shape[1])[1], shapes, vmap_method="sequential")
    return tuple(call(*vectors, upstream))


with_products.defvjp(_with_products_forward, _with_products_backward)
