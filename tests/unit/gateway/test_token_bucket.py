"""The rate limit of the gateway."""

from fedlearn.gateway.token_bucket import TokenBucket


def test_a_bucket_that_turns_requests_down_fills_again() -> None:
    bucket = TokenBucket(rate_per_s=1.0, now_s=0.0)
    assert [bucket.has(now_s=0.0) for _ in range(100)].count(True) == 2
    assert bucket.has(now_s=1.0)
