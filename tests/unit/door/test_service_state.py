"""What the door knows of its exchanges: every reply gets one verdict, the same for good."""

from fedlearn.core.messages import ClientId
from fedlearn.door.exchange import (
    ACCEPTED,
    LATE,
    Docket,
    ExchangeState,
    Key,
    Phase,
    Ruling,
    Standing,
    TokenBucket,
    Verdict,
)

KEY = Key("run", "TrainRequest", 5, 0, 0)
FIRST, SECOND, THIRD = map(ClientId, range(3))


def opened(docket: Docket, key: Key = KEY) -> ExchangeState:
    exchange = ExchangeState.of(key, [(FIRST, 0), (SECOND, 0), (THIRD, 0)], now_s=0.0)
    docket.open(exchange)
    return exchange


def test_a_reply_is_open_then_taken_then_accepted_and_stays_so() -> None:
    docket = Docket("run")
    assert docket.judge(KEY, FIRST) is Standing.UNKNOWN
    exchange = opened(docket)
    assert docket.judge(KEY, FIRST) is Standing.OPEN
    exchange.take(FIRST)
    assert docket.judge(KEY, FIRST) is Standing.TAKEN
    exchange.log(FIRST, now_s=1.0)
    assert docket.judge(KEY, FIRST) is Standing.TAKEN
    assert exchange.consume(1, failed=False) == [FIRST]
    assert docket.judge(KEY, FIRST) == ACCEPTED
    exchange.close()
    docket.remember(KEY, exchange.logged[: exchange.num_consumed])
    assert docket.judge(KEY, FIRST) == ACCEPTED


def test_what_was_logged_and_not_consumed_is_late() -> None:
    docket = Docket("run")
    exchange = opened(docket)
    for client_id in (SECOND, FIRST):
        exchange.take(client_id)
        exchange.log(client_id, now_s=1.0)
    exchange.consume(1, failed=False)
    assert exchange.close() == ([FIRST], [THIRD])
    docket.remember(KEY, [SECOND])
    assert [docket.judge(KEY, each) for each in (FIRST, SECOND, THIRD)] == [LATE, ACCEPTED, LATE]


def test_a_reply_that_could_not_be_stored_may_come_again() -> None:
    docket = Docket("run")
    exchange = opened(docket)
    exchange.take(FIRST)
    exchange.put_back(FIRST)
    assert docket.judge(KEY, FIRST) is Standing.OPEN


def test_older_exchanges_are_late_and_those_to_come_are_unknown() -> None:
    docket = Docket("run")
    opened(docket)
    assert docket.judge(KEY._replace(round_num=4, attempt=9), FIRST) == LATE
    assert docket.judge(KEY._replace(round_num=6), FIRST) is Standing.UNKNOWN
    assert docket.judge(KEY._replace(kind="EvaluateRequest"), FIRST) is Standing.UNKNOWN


def test_another_runs_reply_and_a_strangers_are_refused() -> None:
    docket = Docket("run")
    opened(docket)
    for key, client_id in ((KEY._replace(run_id="other"), FIRST), (KEY, ClientId(9))):
        ruling = docket.judge(key, client_id)
        assert isinstance(ruling, Ruling)
        assert ruling.verdict is Verdict.REFUSED


def test_an_exchange_that_is_opened_again_has_no_verdicts_yet() -> None:
    docket = Docket("run")
    opened(docket)
    docket.remember(KEY, [FIRST])
    opened(docket)
    assert docket.judge(KEY, FIRST) is Standing.OPEN


def test_a_phase_does_not_change_once_the_reply_is_here() -> None:
    exchange = opened(Docket("run"))
    exchange.move(FIRST, Phase.TRAINING, now_s=1.0)
    exchange.move(FIRST, Phase.TRAINING, now_s=2.0)
    assert exchange.participants[FIRST].since_s == 1.0
    exchange.take(FIRST)
    exchange.log(FIRST, now_s=3.0)
    exchange.move(FIRST, Phase.GONE, now_s=4.0)
    assert exchange.participants[FIRST].phase is Phase.REPORTED
    exchange.consume(1, failed=True)
    assert exchange.participants[FIRST].phase is Phase.FAILED


def test_the_name_of_a_folder_tells_the_key() -> None:
    assert Key.of_folder("run", KEY.folder) == KEY


def test_a_bucket_that_turns_requests_down_fills_again() -> None:
    bucket = TokenBucket(rate_per_s=1.0, now_s=0.0)
    assert [bucket.has(now_s=0.0) for _ in range(100)].count(True) == 2
    assert bucket.has(now_s=1.0)
