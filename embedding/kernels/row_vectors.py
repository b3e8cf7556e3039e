"""One table row as a value inside numba: a vector of float32 that stays in registers.

Plain numba loops over the columns of a row keep their accumulator in memory and pay every load and store twice. Here a
row is a value of type `Row(columns)`, which LLVM turns into whatever vector registers the processor has. It has `+ - *
/`, square root, clip and sum over it. The width is part of the type of the `Width` argument, so a kernel is compiled
once per width and numba's file cache works. A matrix is `(address, bytes from row to row)`, see `arrays.py`.
Nothing here reorders floating point: a kernel gives the same bits on every machine, and the same as numpy's
element-wise float32.
"""

from __future__ import annotations

import functools
import operator
import zlib
from pathlib import Path
from typing import Any

from llvmlite import ir
from numba import extending, njit, types
from numba.core import cgutils
from numba.core.datamodel import models
from numba.core.imputils import lower_builtin
from numba.core.typing.templates import AbstractTemplate, infer_global, signature

from podembed.embedding.kernels.arrays import CACHE_LINE_BYTES

MAX_COLUMNS = 128

_FLOAT = ir.FloatType()
_INT32 = ir.IntType(32)
_INT64 = ir.IntType(64)
# Part of the name of every type below and so of numba's cache key. Numba watches the file of a kernel, but not those of
# the kernels that it calls.
_SOURCES = sorted(Path(__file__).parent.glob("*.py"))
SOURCE_STAMP = f"{zlib.crc32(b''.join(source.read_bytes() for source in _SOURCES)):08x}"

# Typed as anything: what they make is called with other arguments than what they decorate.
intrinsic: Any = extending.intrinsic
_njit: Any = njit
_infer_global: Any = infer_global
# Without reference counts: otherwise numba counts, atomically and per bag, the arrays that it passes to helpers. A
# kernel therefore cannot allocate, which is wanted. Without an entry for C, which nobody calls: to compile it takes a
# sixth of the time of a kernel.
_OPTIONS = {"nogil": True, "boundscheck": False, "error_model": "numpy", "_nrt": False, "no_cfunc_wrapper": True}
jit: Any = functools.partial(_njit, cache=True, **_OPTIONS)
# Of helpers, which LLVM puts into the kernels that call them, and to which Python has no entry. Numba could put them
# there, too, but then works through a helper again wherever it is called, and most rules take twice as long to compile.
HELPER: Any = _OPTIONS | {"forceinline": True, "no_cpython_wrapper": True}
inlined: Any = functools.partial(_njit, **HELPER)


class RowType(types.Type):
    """Numba type of a row value with `columns` float32."""

    def __init__(self, columns: int) -> None:
        self.columns = columns
        super().__init__(name=f"Row({columns}, {SOURCE_STAMP})")


class WidthType(types.Type):
    """Numba type of a `Width`: the number itself, known to the compiler."""

    def __init__(self, columns: int) -> None:
        self.columns = columns
        super().__init__(name=f"Width({columns}, {SOURCE_STAMP})")


class Width:
    """Tells a kernel how many columns a row value has. Get one from `width_of`, so that there is one object per
    width.
    """

    __slots__ = ("_numba_type_", "columns")

    def __init__(self, columns: int) -> None:
        self.columns = columns
        self._numba_type_ = WidthType(columns)


@functools.cache
def width_of(dim: int) -> Width:
    """The widest divisor of `dim` up to 128: a kernel walks over a row in `dim / width` equal parts, usually one."""
    return Width(max(columns for columns in range(1, min(dim, MAX_COLUMNS) + 1) if dim % columns == 0))


@extending.register_model(RowType)
class _RowModel(models.PrimitiveModel):
    def __init__(self, manager, row_type) -> None:
        super().__init__(manager, row_type, ir.VectorType(_FLOAT, row_type.columns))


extending.register_model(WidthType)(models.OpaqueModel)


@extending.unbox(WidthType)
def _unbox_width(width_type, obj, c):
    return extending.NativeValue(c.context.get_dummy_value())


def _vector(columns: int) -> Any:
    return ir.VectorType(_FLOAT, columns)


def _splat(builder: Any, scalar: Any, columns: int) -> Any:
    single = builder.insert_element(ir.Constant(_vector(columns), ir.Undefined), scalar, _INT32(0))
    return builder.shuffle_vector(single, single, ir.Constant(ir.VectorType(_INT32, columns), [0] * columns))


def _address(builder: Any, matrix: Any, row: Any, column: Any) -> Any:
    start, stride_bytes = builder.extract_value(matrix, 0), builder.extract_value(matrix, 1)
    return builder.add(start, builder.add(builder.mul(row, stride_bytes), builder.shl(column, _INT64(2))))


def _call(builder: Any, name: str, arguments: list[Any]) -> Any:
    function_type = ir.FunctionType(arguments[0].type, [argument.type for argument in arguments])
    return builder.call(cgutils.get_or_insert_function(builder.module, function_type, name), arguments)


_MATRIX = types.UniTuple(types.int64, 2)
# The matrix whose row numbers are addresses.
ANYWHERE = (0, 1)


@intrinsic
def load(typing_context, width, matrix, row, column):
    """The row value at `matrix[row, column : column + width]`."""

    def generate(context, builder, sig, args):
        pointer = builder.inttoptr(_address(builder, *args[1:]), _vector(width.columns).as_pointer())
        return builder.load(pointer, align=4)

    return RowType(width.columns)(width, _MATRIX, types.int64, types.int64), generate


@intrinsic
def store(typing_context, matrix, row, column, value):
    """Writes a row value to `matrix[row, column : column + width]`."""

    def generate(context, builder, sig, args):
        pointer = builder.inttoptr(_address(builder, *args[:3]), args[3].type.as_pointer())
        builder.store(args[3], pointer, align=4)
        return context.get_dummy_value()

    return types.void(_MATRIX, types.int64, types.int64, value), generate


@intrinsic
def store_streaming(typing_context, matrix, row, column, value):
    """As `store`, past the caches where `can_stream` holds: the old content is not read first and nothing is pushed out
    for it.
    """
    columns = value.columns

    def generate(context, builder, sig, args):
        pointer = builder.inttoptr(_address(builder, *args[:3]), args[3].type.as_pointer())
        written = builder.store(args[3], pointer, align=CACHE_LINE_BYTES if columns % 16 == 0 else 4)
        if columns % 16 == 0:
            written.set_metadata("nontemporal", builder.module.add_metadata([_INT32(1)]))
        return context.get_dummy_value()

    return types.void(_MATRIX, types.int64, types.int64, value), generate


@intrinsic
def publish(typing_context):
    """Orders streaming stores before everything that follows, so that another thread or process sees them."""

    def generate(context, builder, sig, args):
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def load_float(typing_context, matrix, row):
    """The float32 at `matrix[row, 0]`."""

    def generate(context, builder, sig, args):
        pointer = builder.inttoptr(_address(builder, args[0], args[1], _INT64(0)), _FLOAT.as_pointer())
        return builder.load(pointer, align=4)

    return types.float32(_MATRIX, types.int64), generate


@intrinsic
def float_of_bits(typing_context, bits):
    """The float32 whose bits are the lower half of an int64."""

    def generate(context, builder, sig, args):
        return builder.bitcast(builder.trunc(args[0], _INT32), _FLOAT)

    return types.float32(types.int64), generate


@intrinsic
def store_float(typing_context, matrix, row, value):
    """Writes a float32 to `matrix[row, 0]`."""

    def generate(context, builder, sig, args):
        pointer = builder.inttoptr(_address(builder, args[0], args[1], _INT64(0)), _FLOAT.as_pointer())
        builder.store(args[2], pointer, align=4)
        return context.get_dummy_value()

    return types.void(_MATRIX, types.int64, types.float32), generate


def _prefetch(builder: Any, start: Any, columns: int, *, for_write: int) -> None:
    byte_pointer = ir.IntType(8).as_pointer()
    function_type = ir.FunctionType(ir.VoidType(), [byte_pointer, _INT32, _INT32, _INT32])
    function = cgutils.get_or_insert_function(builder.module, function_type, "llvm.prefetch.p0")
    for offset in range(0, 4 * columns, CACHE_LINE_BYTES):
        pointer = builder.inttoptr(builder.add(start, _INT64(offset)), byte_pointer)
        builder.call(function, [pointer, _INT32(for_write), _INT32(3), _INT32(1)])


@intrinsic
def prefetch_to_read(typing_context, width, matrix, row, column):
    """Asks for the cache lines of a row ahead of its use."""

    def generate(context, builder, sig, args):
        _prefetch(builder, _address(builder, *args[1:]), width.columns, for_write=0)
        return context.get_dummy_value()

    return types.void(width, _MATRIX, types.int64, types.int64), generate


@intrinsic
def prefetch_to_write(typing_context, width, matrix, row, column):
    """Asks for the cache lines of a row that is going to be changed."""

    def generate(context, builder, sig, args):
        _prefetch(builder, _address(builder, *args[1:]), width.columns, for_write=1)
        return context.get_dummy_value()

    return types.void(width, _MATRIX, types.int64, types.int64), generate


@intrinsic
def prefetch_item(typing_context, array, item):
    """Asks for one item of a one-dimensional array that is going to be changed; `item` may lie past the end."""

    def generate(context, builder, sig, args):
        data = context.make_array(sig.args[0])(context, builder, args[0]).data
        start = builder.ptrtoint(builder.gep(data, [args[1]]), _INT64)
        _prefetch(builder, start, 1, for_write=1)
        return context.get_dummy_value()

    return types.void(array, types.int64), generate


@intrinsic
def prefetch_float(typing_context, matrix, row):
    """Asks for the float32 at `matrix[row, 0]`, which is going to be changed."""

    def generate(context, builder, sig, args):
        _prefetch(builder, _address(builder, args[0], args[1], _INT64(0)), 1, for_write=1)
        return context.get_dummy_value()

    return types.void(_MATRIX, types.int64), generate


@intrinsic
def columns_of(typing_context, width):
    """The number a `Width` stands for."""

    def generate(context, builder, sig, args):
        return _INT64(width.columns)

    return types.int64(width), generate


@intrinsic
def splat(typing_context, width, scalar):
    """A row value with the same number, rounded to float32, in every column."""

    def generate(context, builder, sig, args):
        return _splat(builder, args[1], width.columns)

    return RowType(width.columns)(width, types.float32), generate


@intrinsic
def square_root(typing_context, row):
    """IEEE square root of each column."""

    def generate(context, builder, sig, args):
        return _call(builder, f"llvm.sqrt.v{row.columns}f32", [args[0]])

    return row(row), generate


@intrinsic
def clip(typing_context, row, low, high):
    """Each column limited to `low..high`; not-a-number stays what it is."""

    def generate(context, builder, sig, args):
        value, lowest, highest = args
        value = builder.select(builder.fcmp_ordered("<", value, lowest), lowest, value)
        return builder.select(builder.fcmp_ordered(">", value, highest), highest, value)

    return row(row, row, row), generate


@intrinsic
def multiply_add(typing_context, x, y, z):
    """`x * y + z`, rounded once where the processor can: only for code whose bits may differ between machines."""

    def generate(context, builder, sig, args):
        name = f"llvm.fmuladd.v{x.columns}f32"
        function_type = ir.FunctionType(args[0].type, [argument.type for argument in args])
        return builder.call(cgutils.get_or_insert_function(builder.module, function_type, name), args)

    return x(x, x, x), generate


@intrinsic
def power(typing_context, row, exponent):
    """Each column to a scalar power. One call of the C library a column, so an order of magnitude slower than a square
    root.
    """

    def generate(context, builder, sig, args):
        # A loop over memory instead of unrolled calls: 128 calls in a row take LLVM seconds to compile.
        memory = cgutils.alloca_once_value(builder, args[0])
        floats = builder.bitcast(memory, _FLOAT.as_pointer())
        with cgutils.for_range(builder, _INT64(row.columns)) as loop:
            pointer = builder.gep(floats, [loop.index])
            builder.store(_call(builder, "llvm.pow.f32", [builder.load(pointer), args[1]]), pointer)
        return builder.load(memory)

    return row(row, types.float32), generate


@intrinsic
def total(typing_context, row):
    """Sum over the columns: filled with zeros to a power of two, then the upper half is added to the lower until one is
    left.
    """
    columns = row.columns
    padded = 1 << (columns - 1).bit_length()

    def generate(context, builder, sig, args):
        value, length = args[0], padded
        zeros = ir.Constant(_vector(columns), [0.0] * columns)
        lanes = ir.Constant(ir.VectorType(_INT32, padded), [min(lane, columns) for lane in range(padded)])
        value = builder.shuffle_vector(value, zeros, lanes)
        while length > 1:
            length //= 2
            lower = ir.Constant(ir.VectorType(_INT32, length), list(range(length)))
            upper = ir.Constant(ir.VectorType(_INT32, length), list(range(length, 2 * length)))
            value = builder.fadd(
                builder.shuffle_vector(value, value, lower), builder.shuffle_vector(value, value, upper)
            )
        return builder.extract_element(value, _INT32(0))

    return types.float32(row), generate


def _define_operator(python_operator, instruction: str) -> None:
    @_infer_global(python_operator)
    class RowOperator(AbstractTemplate):
        def generic(self, args, kws):
            if len(args) == 2 and isinstance(args[0], RowType) and args[0] == args[1]:
                return signature(args[0], *args)
            return None

    @lower_builtin(python_operator, RowType, RowType)
    def generate(context, builder, sig, args):
        return getattr(builder, instruction)(*args)


for _python_operator, _instruction in (
    (operator.add, "fadd"),
    (operator.sub, "fsub"),
    (operator.mul, "fmul"),
    (operator.truediv, "fdiv"),
):
    _define_operator(_python_operator, _instruction)
