"""The numbers of a case, as in numbers.cpp: a pure function of (case, stream, index)."""
import numpy
import torch

_MASK = (1 << 64) - 1


def _splitmix(x):
    with numpy.errstate(over="ignore"):
        x = x + numpy.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> numpy.uint64(30))) * numpy.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> numpy.uint64(27))) * numpy.uint64(0x94D049BB133111EB)
        return x ^ (x >> numpy.uint64(31))


def _random_bits(seed, stream, count):
    base = _splitmix(numpy.array([seed & _MASK], dtype=numpy.uint64)) + numpy.uint64(stream)
    return _splitmix(_splitmix(base) + numpy.arange(count, dtype=numpy.uint64))


def _count(shape):
    return int(numpy.prod(shape, dtype=numpy.int64))


def random_tensor(shape, seed, stream, center=0.0, spread=1.0):
    """fp64, row-major."""
    bits = _random_bits(seed, stream, _count(shape))
    values = (bits >> numpy.uint64(11)).astype(numpy.float64) * 2.0**-52 - 1.0
    return torch.from_numpy((center + spread * values).reshape(shape))


def random_ids(shape, seed, stream, limit):
    bits = _random_bits(seed, stream, _count(shape)) % numpy.uint64(limit)
    return torch.from_numpy(bits.astype(numpy.int64).reshape(shape))
