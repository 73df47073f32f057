"""Latency and bandwidth are found again, also where some times are far off."""

import math

import pytest

from paceline.measure.bench_fit import fit_line

SIZES = [4**power for power in range(3, 13)]


@pytest.mark.parametrize("latency_s", [0.0, 2e-5, 0.04])
@pytest.mark.parametrize("bytes_per_s", [1.25e7, 1e9, 4e11])
def test_a_line_is_found_again_although_a_third_of_its_times_are_late(latency_s, bytes_per_s):
    times = [latency_s + size / bytes_per_s for size in SIZES]
    for late in (1, 4, 7):
        times[late] *= 7
    fit = fit_line(SIZES, times)
    assert fit.latency_s == pytest.approx(latency_s, rel=1e-3, abs=1e-12)
    assert fit.bytes_per_s == pytest.approx(bytes_per_s, rel=1e-3)
    assert fit.typical_deviation < 1e-3
    assert fit.largest_deviation == pytest.approx(6 / 7, rel=1e-3)


@pytest.mark.parametrize(
    ("sizes", "times", "latency_s", "bytes_per_s"),
    [
        ([10, 100, 1000], [0.5, 0.5, 0.5], 0.5, math.inf),  # the size does not show
        ([10, 100, 1000], [3.0, 2.0, 1.0], 1.0, math.inf),  # nonsense: larger is faster
        ([100, 1000], [0.1, 1.0], 0.0, 1000.0),
    ],
)
def test_neither_a_latency_nor_a_slope_is_below_0(sizes, times, latency_s, bytes_per_s):
    fit = fit_line(sizes, times)
    assert (fit.latency_s, fit.bytes_per_s) == (
        pytest.approx(latency_s),
        pytest.approx(bytes_per_s),
    )


def test_one_size_makes_no_line():
    assert fit_line([8], [1.0]) is None
    assert fit_line([8, 8], [1.0, 2.0]) is None
