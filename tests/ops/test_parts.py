import pytest

from shoal.ops.parts import LEAST, parts


@pytest.mark.parametrize(
    ("number", "most", "expected"),
    [(512, 512, 1), (513, 512, 3), (2048, 512, 4), (1021, 512, 1), (1000, 512, 2), (100, 0, 1), (7, 512, 1)],
)
def test_some_divisions(number, most, expected):
    assert parts(number, most) == expected


@pytest.mark.parametrize("most", [1, 3, 64, 512])
def test_parts_are_equal_and_neither_large_nor_tiny(most):
    for number in range(1, 2000):
        cuts = parts(number, most)
        assert number % cuts == 0
        assert cuts == 1 or number / cuts <= most <= LEAST * number / cuts
