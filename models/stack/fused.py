"""A compiled kernel (numba) that trains small chains of Linear layers by plain SGD, one network at a time.

A network is trained for all its steps while its weights, activations and gradients stay in the first-level
cache, and nothing is called per step: batched products of torch read and write all of them once per
operation. Without numba (`pip install 'gossamer[fast]'`) torch trains; results agree up to rounding.

Inside, a layer's weights are stored transposed, [inputs, cells], and every row is padded with zeros to whole
vectors, so that all products have the form C += A · B with rows of B and C in vector registers.

Inputs that are 0 in all samples of a step, such as the margins of images, are left out of the products: their
weights neither contribute nor change.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

_WIDTH = 16
"""Columns of a tile: one vector with AVX-512, two with AVX2, four with NEON."""
_ROWS = 4
"""Rows of a tile: with AVX2 and NEON as many as fit into the registers."""
_DEPTH = 256
"""Products that are added to a tile at once: a column of tiles of B stays in the first-level cache."""

_compiled = njit(nogil=True, cache=True, error_model="numpy", fastmath={"contract"})
_inlined = njit(nogil=True, cache=True, error_model="numpy", fastmath={"contract"}, inline="always")


@intrinsic
def _tile(
    context: Any,
    c: Any,
    c_row: Any,
    a: Any,
    a_row: Any,
    a_column: Any,
    b: Any,
    b_row: Any,
    depth: Any,
) -> Any:
    """Compute C += A · B for a tile of C, given by addresses; the sums stay in registers.

    The products are summed before C is added, because a sum that begins with C loses their last digits.
    c_row, a_row, b_row, a_column: the values between two rows, or columns, of a matrix. depth: the rows of B,
    at least one.
    """
    signature = types.void(*[types.intp] * 8)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        c, c_row, a, a_row, a_column, b, b_row, depth = arguments
        whole, single = ir.IntType(64), ir.FloatType()
        vector, lane = ir.VectorType(single, _WIDTH), ir.IntType(32)

        def number(value: int) -> Any:
            return ir.Constant(whole, value)

        def at(address: Any, offset: Any) -> Any:
            return builder.gep(builder.inttoptr(address, single.as_pointer()), [offset])

        def load(pointer: Any) -> Any:
            value = builder.load(builder.bitcast(pointer, vector.as_pointer()))
            value.align = 4
            return value

        def spread(value: Any) -> Any:
            undefined = ir.Constant(vector, ir.Undefined)
            first = builder.insert_element(undefined, value, ir.Constant(lane, 0))
            lanes = ir.Constant(ir.VectorType(lane, _WIDTH), [0] * _WIDTH)
            return builder.shuffle_vector(first, undefined, lanes)

        targets = [at(c, builder.mul(c_row, number(row))) for row in range(_ROWS)]
        zero = ir.Constant(vector, [0.0] * _WIDTH)
        before = builder.block
        loop = builder.append_basic_block("loop")
        after = builder.append_basic_block("after")
        builder.branch(loop)
        builder.position_at_end(loop)
        index, sums = builder.phi(whole), [builder.phi(vector) for _ in targets]
        right = load(at(b, builder.mul(b_row, index)))
        column = builder.mul(a_column, index)
        ends = []
        for row, total in enumerate(sums):
            left = builder.load(at(a, builder.add(builder.mul(a_row, number(row)), column)))
            product = builder.fmul(spread(left), right, flags=["contract"])
            ends.append(builder.fadd(product, total, flags=["contract"]))
        following = builder.add(index, number(1))
        values = zip([index, *sums], [number(0), *[zero] * _ROWS], [following, *ends], strict=True)
        for phi, first, later in values:
            phi.add_incoming(first, before)
            phi.add_incoming(later, loop)
        builder.cbranch(builder.icmp_signed("<", following, depth), loop, after)
        builder.position_at_end(after)
        for target, end in zip(targets, ends, strict=True):
            total = builder.fadd(load(target), end)
            builder.store(total, builder.bitcast(target, vector.as_pointer())).align = 4
        return context.get_dummy_value()

    return signature, generate


@_compiled
def _add_product(
    c: Any,
    c_row: int,
    a: Any,
    a_row: int,
    a_column: int,
    b: Any,
    b_row: int,
    shape: tuple[int, int, int],
) -> None:
    """Compute C += A · B. shape: the rows and columns of C, rounded up to tiles, and the rows of B."""
    rows, columns, depth = shape
    for first in range(0, depth, _DEPTH):
        part = min(_DEPTH, depth - first)
        for column in range(0, columns, _WIDTH):
            right = b + 4 * (first * b_row + column)
            for row in range(0, rows, _ROWS):
                left = a + 4 * (row * a_row + first * a_column)
                _tile(  # pyright: ignore[reportCallIssue]
                    c + 4 * (row * c_row + column), c_row, left, a_row, a_column, right, b_row, part
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
def _is_largest(outputs: Any, label: int, classes: int) -> bool:
    """Return whether a label's output is the largest; of equal ones the first counts, and NaN is larger.

    Outputs after those of the classes must be −∞.
    """
    own, less, greater, equal = outputs[label], 0, 0, 0
    for i in range(len(outputs)):
        less += outputs[i] < own
        greater += outputs[i] > own
        equal += outputs[i] == own
    if less + greater + equal == len(outputs) and (greater or equal == 1):
        return greater == 0
    best = 0
    for i in range(1, classes):
        if not math.isnan(outputs[best]) and not outputs[i] <= outputs[best]:
            best = i
    return best == label


@_compiled
def _softmax(outputs: Any, label: int, classes: int) -> float:
    """Replace outputs by their softmax; return the cross-entropy of the label."""
    largest = outputs[0]
    for i in range(1, classes):
        largest = outputs[i] if outputs[i] > largest else largest
    own, total = outputs[label] - largest, np.float32(0.0)
    for i in range(len(outputs)):
        outputs[i] = _exp(outputs[i] - largest)
    for i in range(classes):
        total += outputs[i]
    for i in range(classes):
        outputs[i] /= total
    return math.log(total) - own


@_compiled
def _transpose(
    source: Any, target: Any, shape: tuple[int, int], width: int, target_width: int
) -> None:
    """Copy a matrix of this shape, with rows of `width` values in memory, to its transpose."""
    rows, columns = shape
    # With two indices, which cannot be negative, it takes half the time.
    from_matrix = source.reshape((len(source) // width, width))
    to_matrix = target.reshape((len(target) // target_width, target_width))
    for row in range(rows):
        for column in range(columns):
            to_matrix[column, row] = from_matrix[row, column]


@_compiled
def _round_up(count: Any, unit: int) -> Any:
    return (count + unit - 1) // unit * unit


@_compiled
def _find_runs(used: Any, runs: Any) -> int:
    """Write the first and the last + 1 of every run of inputs that are used, in whole tiles; return how many.

    used: not 0 for an input that is used.
    """
    found, end = 0, -1
    for begin in range(0, len(used), _ROWS):
        for i in range(begin, begin + _ROWS):
            if used[i] != 0:
                if begin != end:
                    runs[found, 0] = begin
                    found += 1
                end = begin + _ROWS
                runs[found - 1, 1] = end
                break
    return found


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
        most, begin = max(most, end - begin), end
    most = _round_up(most, _ROWS)
    # One piece of memory: every layer's weights, biases, outputs (the inputs are those of layer −1) and δ.
    wide = np.empty(layers + 1, np.int64)
    weight_at, bias_at = np.empty(layers, np.int64), np.empty(layers, np.int64)
    output_at, delta_at = np.empty(layers + 1, np.int64), np.empty(layers + 1, np.int64)
    size = np.int64(0)
    largest = np.int64(0)
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
    memory = np.empty(size + largest + _WIDTH, np.float32)
    offset = (-memory.ctypes.data // 4) % _WIDTH  # vectors that begin at a cache line are faster
    memory = memory[offset:]
    # Padding must be 0 wherever it is multiplied; that of outputs and of δ is set in every step.
    memory[output_at[0] : output_at[1]] = 0
    memory[turned_at : turned_at + largest] = 0
    for layer in range(layers):
        memory[weight_at[layer] : bias_at[layer] + wide[layer + 1]] = 0
    base = memory.ctypes.data
    sums = np.zeros(wide[layers], np.float32)
    used = np.zeros(wide[0], np.float32)
    runs = np.empty((wide[0] // _ROWS, 2), np.int64)
    totals, correct = np.zeros(peers), np.zeros(peers, np.int64)
    for peer in range(peers):
        network = values[rows[peer]]
        for layer in range(layers):
            inputs, outputs = cells[layer], cells[layer + 1]
            width = wide[layer + 1]
            given = network[places[layer, 0] : places[layer, 0] + inputs * outputs]
            weight = memory[weight_at[layer] : weight_at[layer] + inputs * width]
            _transpose(given, weight, (outputs, inputs), inputs, width)
            if places[layer, 1] >= 0:
                bias = memory[bias_at[layer] : bias_at[layer] + outputs]
                bias[:] = network[places[layer, 1] : places[layer, 1] + outputs]
        begin = 0
        for end in ends:
            batch = end - begin
            padded = _round_up(batch, _ROWS)
            used[:] = 0
            for row in range(batch):
                x_at = output_at[0] + row * wide[0]
                x = memory[x_at : x_at + cells[0]]
                source = pool[index[peer, begin + row]]
                for i in range(len(x)):
                    x[i] = source[i]
                    used[i] += abs(source[i])
            count = _find_runs(used, runs)
            for layer in range(layers):
                width = wide[layer + 1]
                bias = memory[bias_at[layer] : bias_at[layer] + width]
                for row in range(padded):
                    z_at = output_at[layer + 1] + row * width
                    z = memory[z_at : z_at + width]
                    for i in range(len(z)):
                        z[i] = bias[i]
                for run in range(1 if layer else count):
                    first, last = (0, cells[layer]) if layer else (runs[run, 0], runs[run, 1])
                    _add_product(
                        base + 4 * output_at[layer + 1], width,
                        base + 4 * (output_at[layer] + first), wide[layer], 1,
                        base + 4 * (weight_at[layer] + first * width), width, (batch, width, last - first),
                    )  # fmt: skip
                z = memory[output_at[layer + 1] : output_at[layer + 1] + batch * width]
                _activate(z, activations[layer])
                if cells[layer + 1] < width:
                    for row in range(batch):
                        z[row * width + cells[layer + 1] : (row + 1) * width] = 0
            # The gradient with respect to the outputs, times −rate.
            scale = np.float32(-rate / batch if mean else -rate)
            width = wide[layers]
            sums[:] = 0
            for row in range(batch):
                label = labels[peer, begin + row]
                o_at, d_at = output_at[layers] + row * width, delta_at[layers] + row * width
                o, d = memory[o_at : o_at + width], memory[d_at : d_at + width]
                for i in range(len(d)):
                    d[i] = o[i]
                if len(priors):
                    for i in range(classes):
                        d[i] += priors[peer, i]
                d[classes:] = -np.inf
                correct[peer] += _is_largest(d, label, classes)
                if loss == 0:
                    d[classes:] = 0
                    d[label] -= np.float32(1.0)
                    for i in range(len(d)):
                        sums[i] += d[i] * d[i]
                else:
                    totals[peer] += _softmax(d, label, classes)
                    d[classes:] = 0
                    d[label] -= np.float32(1.0)
                for i in range(len(d)):
                    d[i] *= scale
            if loss == 0:
                for i in range(classes):
                    totals[peer] += 0.5 * sums[i]
            for back in range(layers):
                layer = layers - 1 - back
                width, inner = wide[layer + 1], wide[layer]
                delta = memory[delta_at[layer + 1] : delta_at[layer + 1] + batch * width]
                output = memory[output_at[layer + 1] : output_at[layer + 1] + batch * width]
                _multiply_by_slope(delta, output, activations[layer])
                if layer:
                    weight = memory[weight_at[layer] : weight_at[layer] + inner * width]
                    turned = memory[turned_at : turned_at + inner * width]
                    _transpose(weight, turned, (cells[layer], cells[layer + 1]), width, inner)
                    d_in = memory[delta_at[layer] : delta_at[layer] + padded * inner]
                    d_in[:] = 0
                    _add_product(
                        base + 4 * delta_at[layer], inner,
                        base + 4 * delta_at[layer + 1], width, 1,
                        base + 4 * turned_at, inner, (batch, inner, cells[layer + 1]),
                    )  # fmt: skip
                for run in range(1 if layer else count):
                    first, last = (0, cells[layer]) if layer else (runs[run, 0], runs[run, 1])
                    _add_product(
                        base + 4 * (weight_at[layer] + first * width), width,
                        base + 4 * (output_at[layer] + first), 1, inner,
                        base + 4 * delta_at[layer + 1], width, (last - first, width, batch),
                    )  # fmt: skip
                if places[layer, 1] >= 0:
                    bias = memory[bias_at[layer] : bias_at[layer] + width]
                    for row in range(batch):
                        d = delta[row * width : (row + 1) * width]
                        for i in range(len(bias)):
                            bias[i] += d[i]
            begin = end
        for layer in range(layers):
            inputs, outputs = cells[layer], cells[layer + 1]
            width = wide[layer + 1]
            given = network[places[layer, 0] : places[layer, 0] + inputs * outputs]
            weight = memory[weight_at[layer] : weight_at[layer] + inputs * width]
            _transpose(weight, given, (inputs, outputs), width, inputs)
            if places[layer, 1] >= 0:
                bias = memory[bias_at[layer] : bias_at[layer] + outputs]
                network[places[layer, 1] : places[layer, 1] + outputs] = bias
    return totals, correct
