"""Integers of a launch: `triton.cdiv` and `triton.next_power_of_2` cost over a microsecond a call outside a kernel."""


def cdiv(x: int, y: int) -> int:
    """Smallest whole number of `y` that holds `x`."""
    return -(-x // y)


def next_power_of_2(n: int) -> int:
    """Smallest power of two that is at least `n`, and at least 1."""
    return 1 << max(n - 1, 0).bit_length()
