"""Linear algebra on many small matrices: one matrix to a thread, instead of all threads on each small matrix.

BLAS splits even a matrix of size 64 among its threads, which costs more than it gains; on a busy machine a hundred
times more.
"""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from threadpoolctl import threadpool_limits


def for_each(function: Callable[[int], object], count: int) -> list:
    """[function(0), ..., function(count - 1)].

    Args:
        function: NumPy linear algebra, which releases the GIL.
    """
    with threadpool_limits(1, user_api="blas"), ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(function, range(count)))


def each(function: Callable[..., np.ndarray], *arrays: np.ndarray) -> np.ndarray:
    """`function` of each matrix (the last two axes) of the arrays, stacked along their (equal) leading axes."""
    leading = arrays[0].shape[:-2]
    places = list(np.ndindex(*leading))
    results = for_each(lambda i: function(*(a[places[i]] for a in arrays)), len(places))
    return np.stack(results).reshape(*leading, *results[0].shape)
