"""Options: rates, lengths, promises and prices as a person writes them."""

import pytest

from paceline.config.errors import InputError
from paceline.plan.serving.load import Request, Served, requests_of
from paceline.plan.serving.options import ApiPrice, api_price_of, range_of, rate_of
from paceline.plan.serving.slo import Slo, slo_of


def test_what_can_be_written():
    assert [rate_of(text) for text in ("5/s", "90/min", "7200/h", "0.5")] == [5, 1.5, 2, 0.5]
    assert range_of("--in", "1000") == (1000, 1000)
    assert range_of("--in", "32-128") == (32, 128)
    assert api_price_of("0.5, 1.5") == ApiPrice(0.5, 1.5)
    assert slo_of("ttft 500ms, tpot 0.04 s") == Slo(ttft_s=0.5, tpot_s=0.04, share=0.95)
    assert slo_of("E2E < 2s, 99 %") == Slo(e2e_s=2, share=0.99)


@pytest.mark.parametrize(
    ("read", "text"),
    [
        *((rate_of, text) for text in ("", "0", "-1/s", "5/week", "nan", "1e9", "5" * 30)),
        *((api_price_of, text) for text in ("", "1", "0,0", "1,-1", "a,b")),
        *((slo_of, text) for text in ("", "99 %", "ttft", "ttft 0ms", "tpot 5", "e2e 1s, e2e 2s")),
        *((slo_of, text) for text in ("ttft 1s, 0 %", "ttft 1s, 101 %", "ttft 1s, 5 %, 6 %")),
        *((lambda text: range_of("--in", text), text) for text in ("", "0", "5-3", "1-", "x")),
    ],
)  # fmt: skip
def test_what_can_t_be_is_refused(read, text):
    with pytest.raises(InputError) as error:
        read(text)
    assert "\n" not in str(error.value)


def test_times_of_a_load():
    requests = [Request((1,), 3, 0.0), Request((1,), 1, 1.0), Request((1,), 2, 1.0)]
    served = Served(requests)
    served.came(0, 1, 0.5)
    served.came(0, 2, 1.5)
    served.came(1, 1, 2.0)
    served.came(2, 0, 2.0)
    served.came(2, 1, 4.0)
    assert not served.is_whole
    served.came(2, 1, 5.0)
    assert served.is_whole
    assert served.ttft == [0.5, 1.0, 3.0]
    assert served.tpot == [0.5, 0.0, 1.0]
    assert served.itl == [0.5, 0.5, 1.0]
    assert served.e2e == [1.5, 1.0, 4.0]
    assert served.tokens_per_s == pytest.approx(6 / 5)
    assert served.percentile("ttft", 0.5) == 1.0
    slo = Slo(ttft_s=1.0, tpot_s=0.4, share=0.6)
    assert slo.broken(served) == ["tpot"]
    assert slo.goodput(served) == pytest.approx(1 / 5)
    assert Slo().goodput(served) == pytest.approx(3 / 5)
    served.was_made(2, 5)
    assert served.tpot[2] == pytest.approx(0.25)
    assert served.num_tokens == 9


def test_a_load_is_that_of_its_seed():
    asked = (50, 10.0, 3, (5, 9), (2, 2), 100)
    requests = requests_of(*asked)
    assert requests == requests_of(*asked)
    assert {len(each.prompt) for each in requests} == {5, 6, 7, 8, 9}
    assert 2 < requests[-1].after_s < 10
    assert all(each.after_s == 0 for each in requests_of(50, None, 3, (5, 9), (2, 2), 100))
