"""Work on many rows in parts, so that what each leaves behind stays in a CPU's caches."""

LEAST = 4  # a part has more than a quarter of the rows it may have, or the work is not divided


def parts(number: int, most: int) -> int:
    """Into how many equal parts of at most `most` rows to divide `number` rows; 1 where none are near.

    most = 0 never divides.
    """
    if not 0 < most < number:
        return 1
    fits = (p for p in range(-(-number // most), LEAST * number // most + 1) if number % p == 0)
    return next(fits, 1)
