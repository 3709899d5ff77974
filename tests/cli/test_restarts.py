from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pagemill.restarts import RestartBudget


def test_pauses_double_up_to_the_longest_until_the_budget_is_spent() -> None:
    budget = RestartBudget(limit=5, window=60.0, first_pause=1.0, longest_pause=5.0)
    assert [budget.died(float(now)) for now in range(6)] == [1.0, 2.0, 4.0, 5.0, 5.0, None]


def test_deaths_older_than_the_window_are_forgotten() -> None:
    budget = RestartBudget(limit=1, window=10.0, first_pause=1.0)
    assert budget.died(0.0) == 1.0
    assert budget.died(10.0) == 1.0
    assert budget.died(19.9) is None


@given(st.lists(st.floats(0.0, 30.0), max_size=60), st.integers(0, 6))
def test_no_window_ever_sees_more_restarts_than_the_limit(gaps: list[float], limit: int) -> None:
    budget = RestartBudget(limit=limit, window=60.0)
    now, restarts = 0.0, []
    for gap in gaps:
        now += gap
        if budget.died(now) is None:
            break
        restarts.append(now)
        assert sum(then > now - 60.0 for then in restarts) <= limit
