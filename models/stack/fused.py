"""A compiled kernel (numba) that trains small chains of Linear layers by plain SGD, one network at a time.

A network is trained for all its steps while its weights, activations and gradients stay in the first-level
cache, and nothing is called per step: batched products of torch read and write all of them once per
operation. Without numba (`pip install 'gossamer[fast]'`) torch trains; results agree up to rounding.

Inside, a layer's weights are stored transposed, [inputs, cells], in panels of _WIDTH columns, padded with
zeros: a panel is one piece of memory, read from its beginning to its end. So all products have the form
C += A · B with rows of B and C in vector registers.

Inputs that are 0 in all samples of a step, such as the margins of images, are left out of the products: their
weights neither contribute nor change.
"""

from __future__ import annotations

import math
from itertools import chain, product
from typing import Any

import numpy as np
from llvmlite import ir
from llvmlite.binding import get_host_cpu_features
from numba import njit, types
from numba.extending import intrinsic

_WIDTH = 16
"""Columns of a panel: one vector with AVX-512, two with AVX2, four with NEON."""
_ROWS, _PANELS = (12, 2) if get_host_cpu_features().get("avx512f") else (6, 1)
"""Most rows and panels of a tile: its sums, a row of B and a value of A must fit into the registers. With
AVX-512, tiles of one panel would load as many vectors as they multiply, which takes longer."""
_BLOCK = 4
"""Consecutive inputs that are left out together if all are 0; divides _WIDTH."""
_DEPTH = 256
"""Products that are added to a tile at once: the rows of B stay in the first-level cache."""

_compiled = njit(nogil=True, cache=True, error_model="numpy", fastmath={"contract"})
_inlined = njit(nogil=True, cache=True, error_model="numpy", fastmath={"contract"}, inline="always")

_WHOLE, _SINGLE, _LANE = ir.IntType(64), ir.FloatType(), ir.IntType(32)
_VECTOR = ir.VectorType(_SINGLE, _WIDTH)


def _at(builder: Any, address: Any, offset: Any) -> Any:
    """Return a pointer to the value `offset` values after an address."""
    return builder.gep(builder.inttoptr(address, _SINGLE.as_pointer()), [offset])


def _load(builder: Any, pointer: Any) -> Any:
    value = builder.load(builder.bitcast(pointer, _VECTOR.as_pointer()))
    value.align = 4
    return value


def _store(builder: Any, value: Any, pointer: Any) -> None:
    builder.store(value, builder.bitcast(pointer, _VECTOR.as_pointer())).align = 4


def _shuffle(builder: Any, first: Any, second: Any, lanes: list[int]) -> Any:
    mask = ir.Constant(ir.VectorType(_LANE, _WIDTH), lanes)
    return builder.shuffle_vector(first, second, mask)


@intrinsic
def _add_tile(
    context: Any,
    rows: Any,
    panels: Any,
    c: Any,
    c_row: Any,
    c_panel: Any,
    start: Any,
    start_row: Any,
    start_panel: Any,
    a: Any,
    a_row: Any,
    a_column: Any,
    b: Any,
    b_row: Any,
    b_panel: Any,
    depth: Any,
) -> Any:
    """Compute C = start + A · B for a tile of C, given by addresses; the sums stay in registers.

    The products are summed before the start is added, because a sum that begins with it loses their last
    digits. rows, panels: of the tile, at most _ROWS and _PANELS. c_row, start_row, a_row, b_row, a_column,
    c_panel, start_panel, b_panel: the values between two rows, columns or panels of a matrix. depth: the
    rows of B, at least one.
    """
    signature = types.void(*[types.intp] * 15)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        rows, panels, c, c_row, c_panel, start, start_row, start_panel, *factors = arguments
        a, a_row, a_column, b, b_row, b_panel, depth = factors

        def number(value: int) -> Any:
            return ir.Constant(_WHOLE, value)

        def place(row: Any, stride: Any, panel: int, panel_stride: Any) -> Any:
            return builder.add(builder.mul(row, stride), builder.mul(number(panel), panel_stride))

        zero = ir.Constant(_VECTOR, [0.0] * _WIDTH)
        undefined = ir.Constant(_VECTOR, ir.Undefined)
        after = builder.append_basic_block("after")
        shape = builder.add(builder.mul(panels, number(_ROWS + 1)), rows)
        shapes = builder.switch(shape, after)
        for width, height in product(range(1, _PANELS + 1), range(1, _ROWS + 1)):
            before = builder.append_basic_block(f"before{height}x{width}")
            shapes.add_case(number(width * (_ROWS + 1) + height), before)
            builder.position_at_end(before)
            loop = builder.append_basic_block(f"loop{height}x{width}")
            last = builder.append_basic_block(f"last{height}x{width}")
            builder.branch(loop)
            builder.position_at_end(loop)
            index = builder.phi(_WHOLE)
            sums = [[builder.phi(_VECTOR) for _ in range(width)] for _ in range(height)]
            right = [
                _load(builder, _at(builder, b, place(index, b_row, panel, b_panel)))
                for panel in range(width)
            ]
            column = builder.mul(a_column, index)
            ends = []
            for row, totals in enumerate(sums):
                left = _at(builder, a, builder.add(builder.mul(a_row, number(row)), column))
                one = builder.insert_element(undefined, builder.load(left), ir.Constant(_LANE, 0))
                spread = _shuffle(builder, one, undefined, [0] * _WIDTH)
                products = [builder.fmul(spread, each, flags=["contract"]) for each in right]
                ends.append(
                    [
                        builder.fadd(each, total, flags=["contract"])
                        for each, total in zip(products, totals, strict=True)
                    ]
                )
            following = builder.add(index, number(1))
            index.add_incoming(number(0), before)
            index.add_incoming(following, loop)
            for total, end in zip(
                chain.from_iterable(sums), chain.from_iterable(ends), strict=True
            ):
                total.add_incoming(zero, before)
                total.add_incoming(end, loop)
            builder.cbranch(builder.icmp_signed("<", following, depth), loop, last)
            builder.position_at_end(last)
            for row, totals in enumerate(ends):
                for panel, total in enumerate(totals):
                    origin = _at(builder, start, place(number(row), start_row, panel, start_panel))
                    target = _at(builder, c, place(number(row), c_row, panel, c_panel))
                    _store(builder, builder.fadd(_load(builder, origin), total), target)
            builder.branch(after)
        builder.position_at_end(after)
        return context.get_dummy_value()

    return signature, generate


@intrinsic
def _copy_panel(
    context: Any,
    source: Any,
    source_row: Any,
    index: Any,
    rows: Any,
    target: Any,
    target_row: Any,
    used: Any,
) -> Any:
    """Copy _WIDTH columns of some rows, at least one; set bits of `used` in columns that are not all 0.

    source, index, target, used: addresses: of the first row of all, of the numbers of the rows to copy, of
    the first copy, and of _WIDTH integers. source_row, target_row: the values between two rows.
    """
    signature = types.void(*[types.intp] * 7)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        source, source_row, index, rows, target, target_row, used = arguments
        lanes = ir.VectorType(_LANE, _WIDTH)
        before, loop = builder.basic_block, builder.append_basic_block("copy")
        after = builder.append_basic_block("copied")
        builder.branch(loop)
        builder.position_at_end(loop)
        row, marks = builder.phi(_WHOLE), builder.phi(lanes)
        numbers = builder.inttoptr(index, _WHOLE.as_pointer())
        number = builder.load(builder.gep(numbers, [row]))
        values = _load(builder, _at(builder, source, builder.mul(number, source_row)))
        _store(builder, values, _at(builder, target, builder.mul(row, target_row)))
        # Without their signs, for -0 is 0.
        bits = builder.shl(builder.bitcast(values, lanes), ir.Constant(lanes, [1] * _WIDTH))
        marked, following = builder.or_(marks, bits), builder.add(row, ir.Constant(_WHOLE, 1))
        row.add_incoming(ir.Constant(_WHOLE, 0), before)
        row.add_incoming(following, loop)
        marks.add_incoming(ir.Constant(lanes, [0] * _WIDTH), before)
        marks.add_incoming(marked, loop)
        builder.cbranch(builder.icmp_signed("<", following, rows), loop, after)
        builder.position_at_end(after)
        _store(
            builder, builder.bitcast(marked, _VECTOR), builder.inttoptr(used, _SINGLE.as_pointer())
        )
        return context.get_dummy_value()

    return signature, generate


@intrinsic
def _transpose_block(
    context: Any, source: Any, source_row: Any, target: Any, target_row: Any
) -> Any:
    """Copy a square block of _WIDTH rows, given by addresses, to its transpose."""
    signature = types.void(*[types.intp] * 4)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        source, source_row, target, target_row = arguments

        def row_of(address: Any, stride: Any, row: int) -> Any:
            return _at(builder, address, builder.mul(stride, ir.Constant(_WHOLE, row)))

        rows = [_load(builder, row_of(source, source_row, row)) for row in range(_WIDTH)]
        half = _WIDTH // 2
        # Exchange the upper right and the lower left quarters of all squares of two halves.
        while half:
            lanes = range(_WIDTH)
            upper = [_WIDTH + lane - half if lane & half else lane for lane in lanes]
            lower = [_WIDTH + lane if lane & half else lane + half for lane in lanes]
            for row in range(_WIDTH):
                if not row & half:
                    pair = rows[row], rows[row + half]
                    rows[row] = _shuffle(builder, *pair, upper)
                    rows[row + half] = _shuffle(builder, *pair, lower)
            half //= 2
        for row, values in enumerate(rows):
            _store(builder, values, row_of(target, target_row, row))
        return context.get_dummy_value()

    return signature, generate


@_compiled
def _add_product(
    c: tuple[Any, int, int],
    start: tuple[Any, int, int],
    a: tuple[Any, int, int],
    b: tuple[Any, int, int],
    shape: tuple[int, int, int],
) -> None:
    """Compute C = start + A · B.

    c, start, b: address, values between two rows, and values between two panels of _WIDTH columns; 0 between
    rows that are one and the same. a: address, values between two rows, and between two columns. shape: the
    rows and columns of C, the latter rounded up to panels, and the rows of B, at least one.
    """
    rows, columns, depth = shape
    tiles = (rows + _ROWS - 1) // _ROWS
    height = (rows + tiles - 1) // tiles  # tiles of equal heights, but the last
    for first in range(0, depth, _DEPTH):
        part = min(_DEPTH, depth - first)
        if first:
            start = c
        for panel in range(0, columns // _WIDTH, _PANELS):
            target, origin = c[0] + 4 * panel * c[2], start[0] + 4 * panel * start[2]
            left, right = a[0] + 4 * first * a[2], b[0] + 4 * (first * b[1] + panel * b[2])
            for row in range(0, rows, height):
                _add_tile(  # pyright: ignore[reportCallIssue]
                    min(height, rows - row),
                    min(_PANELS, columns // _WIDTH - panel),
                    target + 4 * row * c[1],
                    c[1],
                    c[2],
                    origin + 4 * row * start[1],
                    start[1],
                    start[2],
                    left + 4 * row * a[1],
                    a[1],
                    a[2],
                    right,
                    b[1],
                    b[2],
                    part,
                )


@_inlined
def _exp(x: Any) -> Any:
    """Return eˣ in single precision, with operations that compilers can do on whole vectors."""
    x = np.float32(-87.0) if x < np.float32(-87.0) else x
    x = np.float32(88.0) if x > np.float32(88.0) else x
    power = np.floor(x * np.float32(1.44269504) + np.float32(0.5))
    # x = power · ln 2 + rest; ln 2 in two parts, of which the first has few bits
    rest = x - power * np.float32(0.693359375)
    rest = rest + power * np.float32(2.12194440e-4)
    series = np.float32(1 / 5040)
    series = series * rest + np.float32(1 / 720)
    series = series * rest + np.float32(1 / 120)
    series = series * rest + np.float32(1 / 24)
    series = series * rest + np.float32(1 / 6)
    series = series * rest + np.float32(0.5)
    series = series * rest + np.float32(1.0)
    series = series * rest + np.float32(1.0)
    return series * np.int32((np.int32(power) + np.int32(127)) << np.int32(23)).view(np.float32)


@_compiled
def _activate(z: Any, activation: int) -> None:
    """Apply an activation function in place; the numbers are those of engines.py."""
    one, two = np.float32(1.0), np.float32(2.0)
    if activation == 1:  # sigmoid
        for i in range(len(z)):
            z[i] = one / (one + _exp(-z[i]))
    elif activation == 2:  # tanh
        for i in range(len(z)):
            z[i] = one - two / (one + _exp(two * z[i]))
    elif activation == 3:  # ReLU
        for i in range(len(z)):
            z[i] = z[i] if not z[i] < np.float32(0.0) else np.float32(0.0)


@_compiled
def _multiply_by_slope(delta: Any, output: Any, activation: int) -> None:
    """Multiply a gradient by the slope of an activation function, which follows from the function's value."""
    one, zero = np.float32(1.0), np.float32(0.0)
    if activation == 1:  # sigmoid
        for i in range(len(delta)):
            delta[i] *= output[i] * (one - output[i])
    elif activation == 2:  # tanh
        for i in range(len(delta)):
            delta[i] *= one - output[i] * output[i]
    elif activation == 3:  # ReLU
        for i in range(len(delta)):
            delta[i] *= one if output[i] > zero else zero


@_compiled
def _read_inputs(pool: Any, index: Any, x: Any, used: Any) -> None:
    """Copy some samples of the pool to the rows of x; `used` is not 0 for inputs that are not 0 in all."""
    inputs = pool.shape[1]
    whole = inputs // _WIDTH * _WIDTH
    for i in range(0, whole, _WIDTH):
        _copy_panel(  # pyright: ignore[reportCallIssue]
            pool.ctypes.data + 4 * i,
            pool.strides[0] // 4,
            index.ctypes.data,
            len(index),
            x.ctypes.data + 4 * i,
            x.shape[1],
            used.ctypes.data + 4 * i,
        )
    used[whole:] = 0
    for row in range(len(index)):
        for i in range(whole, inputs):
            x[row, i] = pool[index[row], i]
            used[i] |= x[row, i] != 0


@_compiled
def _gradient_of_loss(
    outputs: Any, labels: Any, prior: Any, loss: int, scale: Any
) -> tuple[float, int]:
    """Replace outputs by the gradient of the summed loss with respect to them, times a scale.

    Return the sum of the losses and the number of correct answers. An answer is the largest output; of equal
    ones the first counts, and NaN is larger than any number. outputs: [classes, samples], so that compilers
    can do the same with whole vectors of samples; rows and columns of padding follow. prior: of every class,
    added to its outputs.
    """
    classes, samples = len(prior), outputs.shape[1]
    largest, answers = np.empty(samples, np.float32), np.zeros(samples, np.int32)
    totals, summed, correct = np.zeros(samples, np.float32), 0.0, 0
    largest[:] = -np.inf
    for i in range(classes):
        for sample in range(samples):
            outputs[i, sample] += prior[i]
            is_number = largest[sample] == largest[sample]
            is_larger = is_number & (not outputs[i, sample] <= largest[sample])
            largest[sample] = outputs[i, sample] if is_larger else largest[sample]
            answers[sample] = i if is_larger else answers[sample]
    for sample in range(len(labels)):
        correct += answers[sample] == labels[sample]
    if loss == 0:
        for sample in range(len(labels)):
            outputs[labels[sample], sample] -= np.float32(1.0)
        for i in range(classes):
            for sample in range(samples):
                totals[sample] += outputs[i, sample] * outputs[i, sample]
                outputs[i, sample] *= scale
        for sample in range(len(labels)):
            summed += 0.5 * totals[sample]
    else:
        for sample in range(len(labels)):
            summed += largest[sample] - outputs[labels[sample], sample]
        for i in range(classes):
            for sample in range(samples):
                outputs[i, sample] = _exp(outputs[i, sample] - largest[sample])
                totals[sample] += outputs[i, sample]
        for i in range(classes):
            for sample in range(samples):
                outputs[i, sample] *= scale / totals[sample]
        for sample in range(len(labels)):
            outputs[labels[sample], sample] -= scale
            summed += math.log(totals[sample])
    outputs[classes:] = 0
    return summed, correct


@_compiled
def _transpose(
    source: Any,
    from_stride: tuple[int, int],
    target: Any,
    to_stride: tuple[int, int],
    shape: tuple[int, int],
) -> None:
    """Copy a matrix of this shape to its transpose.

    from_stride, to_stride: the values between two rows, and between two panels of _WIDTH columns.
    """
    rows, columns = shape
    whole_rows, whole_columns = rows // _WIDTH * _WIDTH, columns // _WIDTH * _WIDTH
    for row in range(0, whole_rows, _WIDTH):
        for column in range(0, whole_columns, _WIDTH):
            from_at = row * from_stride[0] + column // _WIDTH * from_stride[1]
            to_at = column * to_stride[0] + row // _WIDTH * to_stride[1]
            _transpose_block(  # pyright: ignore[reportCallIssue]
                source.ctypes.data + 4 * from_at,
                from_stride[0],
                target.ctypes.data + 4 * to_at,
                to_stride[0],
            )
    for row in range(rows):
        to_panel = row // _WIDTH * to_stride[1] + row % _WIDTH
        for column in range(whole_columns if row < whole_rows else 0, columns):
            from_at = row * from_stride[0] + column // _WIDTH * from_stride[1] + column % _WIDTH
            target[to_panel + column * to_stride[0]] = source[from_at]


@_compiled
def _round_up(count: Any, unit: int) -> Any:
    return (count + unit - 1) // unit * unit


@_compiled
def _find_runs(used: Any, runs: Any) -> int:
    """Write the first and the last + 1 of every run of used inputs, in whole blocks; return how many.

    used: not 0 for an input that is used; if none is, the first one counts, for there is always a product.
    """
    found, end = 0, -1
    for begin in range(0, len(used), _BLOCK):
        following = min(begin + _BLOCK, len(used))
        for i in range(begin, following):
            if used[i] != 0:
                if begin != end:
                    runs[found, 0] = begin
                    found += 1
                end = following
                runs[found - 1, 1] = end
                break
    if found == 0:
        runs[0, 0], runs[0, 1], found = 0, 1, 1
    return found


@_compiled
def permute(words: Any, samples: Any, epochs: Any, orders: Any) -> None:
    """Write permutations of the numbers below `samples`, as torch.randperm makes them from the same numbers.

    words: random numbers of 64 bits, each for two steps: the upper half for the first. samples, epochs: of
    each learner, which begins with a new word. orders: all permutations, one after the other.
    """
    begin, word = 0, 0
    for learner in range(len(samples)):
        count, step = samples[learner], 0
        for _ in range(epochs[learner]):
            for i in range(count):
                orders[begin + i] = i
            for i in range(count - 1):
                both = np.uint64(words[word + step // 2])
                half = np.uint32(
                    both & np.uint64(0xFFFFFFFF) if step % 2 else both >> np.uint64(32)
                )
                other = i + np.int64(half % np.uint32(count - i))
                kept = orders[begin + i]
                orders[begin + i] = orders[begin + other]
                orders[begin + other] = kept
                step += 1
            begin += count
        word += (step + 1) // 2


@_compiled
def train(
    values: Any,
    rows: Any,
    cells: Any,
    places: Any,
    activations: Any,
    pool: Any,
    index: Any,
    labels: Any,
    ends: Any,
    loss: int,
    mean: bool,
    rate: float,
    priors: Any,
) -> tuple[Any, Any]:
    """Train some networks; return for each the sum of the losses and the number of correct answers.

    values: [networks, parameters], of which `rows` are trained, in place. cells: of every layer, inputs
    first. places: [layers, 2], where a layer's weight and bias begin among the parameters; −1 for no bias.
    activations, loss: their numbers in engines.py. pool, index, labels, ends, mean, priors: see TrainingJob;
    priors of no rows are none.
    """
    layers, peers = len(activations), len(rows)
    classes, most = cells[layers], np.int64(0)
    begin = 0
    for end in ends:
        most, begin = max(most, _round_up(end - begin, _WIDTH)), end
    # One piece of memory: every layer's weights, biases, outputs (the inputs are those of layer −1) and δ.
    wide = np.empty(layers + 1, np.int64)
    weight_at, bias_at = np.empty(layers, np.int64), np.empty(layers, np.int64)
    output_at, delta_at = np.empty(layers + 1, np.int64), np.empty(layers + 1, np.int64)
    size = np.int64(0)
    largest = most * _round_up(classes, _WIDTH)  # of the matrices that are transposed
    for layer in range(layers + 1):
        wide[layer] = _round_up(cells[layer], _WIDTH)
        output_at[layer] = size
        size += most * wide[layer]
        if layer:
            delta_at[layer] = size
            size += most * wide[layer]
            weight_at[layer - 1] = size
            size += wide[layer - 1] * wide[layer]
            bias_at[layer - 1] = size
            size += wide[layer]
            largest = max(largest, wide[layer - 1] * wide[layer])
    turned_at = size
    # Zeros, because padding must be 0 wherever it is multiplied.
    memory = np.zeros(size + largest + _WIDTH, np.float32)
    offset = (-memory.ctypes.data // 4) % _WIDTH  # vectors that begin at a cache line are faster
    memory = memory[offset:]
    base = memory.ctypes.data
    prior = np.zeros(classes, np.float32)
    nothing, ones = np.zeros(_WIDTH, np.float32), np.ones(1, np.float32)
    used = np.zeros(cells[0], np.int32)
    runs = np.empty((wide[0] // _BLOCK, 2), np.int64)
    totals, correct = np.zeros(peers), np.zeros(peers, np.int64)
    for peer in range(peers):
        network = values[rows[peer]]
        if len(priors):
            prior[:classes] = priors[peer]
        for layer in range(layers):
            inputs, units = cells[layer], cells[layer + 1]
            given = network[places[layer, 0] : places[layer, 0] + inputs * units]
            weight = memory[weight_at[layer] : bias_at[layer]]
            panels = _WIDTH, _WIDTH * wide[layer]
            _transpose(given, (inputs, _WIDTH), weight, panels, (units, inputs))
            if places[layer, 1] >= 0:
                for i in range(units):
                    memory[bias_at[layer] + i] = network[places[layer, 1] + i]
        begin = 0
        for end in ends:
            batch = end - begin
            x = memory[output_at[0] : output_at[0] + batch * wide[0]].reshape(batch, wide[0])
            _read_inputs(pool, index[peer, begin:end], x, used)
            count = _find_runs(used, runs)
            for layer in range(layers):
                width = wide[layer + 1]
                for run in range(1 if layer else count):
                    first, last = (0, cells[layer]) if layer else (runs[run, 0], runs[run, 1])
                    target = base + 4 * output_at[layer + 1], width, _WIDTH
                    _add_product(
                        target,
                        target if run else (base + 4 * bias_at[layer], 0, _WIDTH),
                        (base + 4 * (output_at[layer] + first), wide[layer], 1),
                        (
                            base + 4 * (weight_at[layer] + first * _WIDTH),
                            _WIDTH,
                            _WIDTH * wide[layer],
                        ),
                        (batch, width, last - first),
                    )
                z = memory[output_at[layer + 1] : output_at[layer + 1] + batch * width]
                _activate(z, activations[layer])
            # The gradient with respect to the outputs, times −rate; computed on the transpose.
            width, samples = wide[layers], _round_up(batch, _WIDTH)
            outputs = memory[output_at[layers] : output_at[layers] + samples * width]
            delta = memory[delta_at[layers] : delta_at[layers] + samples * width]
            turned = memory[turned_at : turned_at + samples * width]
            _transpose(outputs, (width, _WIDTH), turned, (samples, _WIDTH), (samples, width))
            scale = np.float32(-rate / batch if mean else -rate)
            loss_sum, right = _gradient_of_loss(
                turned.reshape(width, samples), labels[peer, begin:end], prior, loss, scale
            )
            totals[peer] += loss_sum
            correct[peer] += right
            _transpose(turned, (samples, _WIDTH), delta, (width, _WIDTH), (width, samples))
            for back in range(layers):
                layer = layers - 1 - back
                width, inner = wide[layer + 1], wide[layer]
                delta = memory[delta_at[layer + 1] : delta_at[layer + 1] + batch * width]
                output = memory[output_at[layer + 1] : output_at[layer + 1] + batch * width]
                _multiply_by_slope(delta, output, activations[layer])
                if layer:
                    weight = memory[weight_at[layer] : bias_at[layer]]
                    turned = memory[turned_at : turned_at + inner * width]
                    panels, turned_panels = (_WIDTH, _WIDTH * inner), (_WIDTH, _WIDTH * width)
                    _transpose(weight, panels, turned, turned_panels, (inner, width))
                    _add_product(
                        (base + 4 * delta_at[layer], inner, _WIDTH),
                        (nothing.ctypes.data, 0, 0),
                        (base + 4 * delta_at[layer + 1], width, 1),
                        (base + 4 * turned_at, _WIDTH, _WIDTH * width),
                        (batch, inner, cells[layer + 1]),
                    )
                for run in range(1 if layer else count):
                    first, last = (0, cells[layer]) if layer else (runs[run, 0], runs[run, 1])
                    weights_at = base + 4 * (weight_at[layer] + first * _WIDTH)
                    target = weights_at, _WIDTH, _WIDTH * inner
                    _add_product(
                        target,
                        target,
                        (base + 4 * (output_at[layer] + first), 1, inner),
                        (base + 4 * delta_at[layer + 1], width, _WIDTH),
                        (last - first, width, batch),
                    )
                if places[layer, 1] >= 0:
                    target = base + 4 * bias_at[layer], 0, _WIDTH
                    _add_product(
                        target,
                        target,
                        (ones.ctypes.data, 0, 0),
                        (base + 4 * delta_at[layer + 1], width, _WIDTH),
                        (1, width, batch),
                    )
            begin = end
        for layer in range(layers):
            inputs, units = cells[layer], cells[layer + 1]
            given = network[places[layer, 0] : places[layer, 0] + inputs * units]
            weight = memory[weight_at[layer] : bias_at[layer]]
            panels = _WIDTH, _WIDTH * wide[layer]
            _transpose(weight, panels, given, (inputs, _WIDTH), (inputs, units))
            if places[layer, 1] >= 0:
                for i in range(units):
                    network[places[layer, 1] + i] = memory[bias_at[layer] + i]
    return totals, correct
