"""Every field of SamplingParams: what is refused, and how it is said."""

import pytest
from says import says

from kdtree import SamplingParams
from kdtree.sampling import MAX_LOGPROBS

NAN, INF = float("nan"), float("inf")

PARAMS = [
    ("max_tokens", 0, ValueError, ["at least 1"]),
    ("max_tokens", -1, ValueError, ["at least 1"]),
    ("max_tokens", True, TypeError, ["integer"]),
    ("max_tokens", 3.0, TypeError, ["integer"]),
    ("max_tokens", "3", TypeError, ["integer"]),
    ("temperature", -0.1, ValueError, ["at least 0"]),
    ("temperature", NAN, ValueError, ["finite"]),
    ("temperature", INF, ValueError, ["finite"]),
    ("temperature", True, TypeError, ["number"]),
    ("temperature", "1", TypeError, ["number"]),
    ("temperature", None, TypeError, ["number"]),
    ("top_k", -1, ValueError, ["0 to"]),
    ("top_k", 2**31, ValueError, ["0 to", 2**31 - 1]),
    ("top_k", 1.0, TypeError, ["integer"]),
    ("top_k", False, TypeError, ["integer"]),
    ("top_k", None, TypeError, ["integer"]),
    ("top_p", 0.0, ValueError, ["(0, 1]"]),
    ("top_p", 1.0001, ValueError, ["(0, 1]"]),
    ("top_p", NAN, ValueError, ["(0, 1]"]),
    ("top_p", True, TypeError, ["number"]),
    ("top_p", None, TypeError, ["number"]),
    ("min_p", -0.1, ValueError, ["[0, 1)"]),
    ("min_p", 1.0, ValueError, ["[0, 1)"]),
    ("min_p", NAN, ValueError, ["[0, 1)"]),
    ("min_p", False, TypeError, ["number"]),
    ("min_p", "0", TypeError, ["number"]),
    ("seed", 2**63, ValueError, [2**63 - 1]),
    ("seed", -(2**63) - 1, ValueError, [-(2**63)]),
    ("seed", 1.0, TypeError, ["integer"]),
    ("seed", None, TypeError, ["integer"]),
    ("seed", True, TypeError, ["integer"]),
    ("n", 0, ValueError, [0, "wants", 1]),
    ("n", True, TypeError, ["integer"]),
    ("n", 2.0, TypeError, ["integer"]),
    ("n", None, TypeError, ["integer"]),
    ("stop", 5, TypeError, ["strings"]),
    ("stop", None, TypeError, ["strings"]),
    ("stop", b"end", TypeError, ["strings"]),
    ("stop", (5,), TypeError, ["strings"]),
    ("stop", ["a", None], TypeError, ["strings"]),
    ("stop", "", ValueError, ["empty"]),
    ("stop", ("a", ""), ValueError, ["empty"]),
    ("stop_token_ids", 5, TypeError, ["token ids"]),
    ("stop_token_ids", None, TypeError, ["token ids"]),
    ("stop_token_ids", "5", TypeError, ["token ids"]),
    ("stop_token_ids", (-1,), ValueError, ["at least 0"]),
    ("stop_token_ids", (2, 1.0), TypeError, ["integer"]),
    ("stop_token_ids", (True,), TypeError, ["integer"]),
    ("ignore_eos", 1, TypeError, ["True"]),
    ("ignore_eos", None, TypeError, ["True"]),
    ("ignore_eos", "no", TypeError, ["True"]),
    ("min_tokens", -1, ValueError, ["0 to", 2]),
    ("min_tokens", 3, ValueError, ["0 to", 2]),
    ("min_tokens", True, TypeError, ["integer"]),
    ("min_tokens", None, TypeError, ["integer"]),
    ("logprobs", -1, ValueError, [f"0 to {MAX_LOGPROBS}"]),
    ("logprobs", MAX_LOGPROBS + 1, ValueError, [f"0 to {MAX_LOGPROBS}"]),
    ("logprobs", 65, ValueError, [f"0 to {MAX_LOGPROBS}"]),
    ("logprobs", True, TypeError, ["integer"]),
    ("logprobs", 1.0, TypeError, ["integer"]),
]


@pytest.mark.parametrize(
    "name, value, error, parts", PARAMS, ids=[f"{row[0]}={row[1]}" for row in PARAMS]
)
def test_sampling_params(name, value, error, parts):
    with says(error, name, *parts):
        SamplingParams(**{"max_tokens": 2} | {name: value})


@pytest.mark.parametrize("name", ["top_k", "seed", "n", "temperature", "min_tokens"])
@pytest.mark.parametrize("sign", [1, -1])
def test_numbers_that_python_does_not_print(name, sign):
    with says(ValueError, f"{name} is about {'-' * (sign < 0)}2^16609, wants"):
        SamplingParams(**{"max_tokens": 2} | {name: sign * 10**5000})
