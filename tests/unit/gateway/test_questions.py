"""The state of exchanges: every reply gets one verdict, which never changes."""

from fedlearn.core.messages import ClientId
from fedlearn.gateway.questions import (
    ACCEPTED,
    LATE,
    ClientPhase,
    QuestionState,
    ReplyState,
    Ruling,
    Verdict,
    VerdictHistory,
    refuse_unusable,
)
from fedlearn.transport.content import TaskKey

KEY = TaskKey("run", "TrainRequest", 5, 0, 0)
FIRST, SECOND, THIRD = map(ClientId, range(3))


def asked() -> QuestionState:
    return QuestionState.of(KEY, dict.fromkeys((FIRST, SECOND, THIRD), 0), now_s=0.0)


def open_history() -> VerdictHistory:
    history = VerdictHistory("run")
    history.open(KEY)
    return history


def test_a_reply_is_open_then_taken_then_accepted_and_stays_so() -> None:
    history = VerdictHistory("run")
    assert history.judge(KEY, FIRST) is ReplyState.UNKNOWN
    question = asked()
    assert question.judge(FIRST) is ReplyState.OPEN
    question.take(FIRST)
    assert question.judge(FIRST) is ReplyState.TAKEN
    question.log(FIRST, now_s=1.0)
    assert question.judge(FIRST) is ReplyState.TAKEN
    assert question.consume(ruling=ACCEPTED, failed=False) == FIRST
    assert question.judge(FIRST) == ACCEPTED
    history.remember(KEY, question.collect_rulings())
    assert history.judge(KEY, FIRST) == ACCEPTED


def test_what_was_logged_and_not_consumed_is_late() -> None:
    history, exchange = open_history(), asked()
    for client_id in (SECOND, FIRST):
        exchange.take(client_id)
        exchange.log(client_id, now_s=1.0)
    exchange.consume(ruling=ACCEPTED, failed=False)
    assert exchange.split_unsettled() == ([FIRST], [THIRD])
    history.remember(KEY, exchange.collect_rulings())
    assert [history.judge(KEY, each) for each in (FIRST, SECOND, THIRD)] == [LATE, ACCEPTED, LATE]


def test_a_reply_that_does_not_count_is_refused_for_good() -> None:
    history, question = open_history(), asked()
    question.take(FIRST)
    question.log(FIRST, now_s=1.0)
    question.consume(ruling=refuse_unusable("the delta is not finite"), failed=False)
    history.remember(KEY, question.collect_rulings())
    for ruling in (question.judge(FIRST), history.judge(KEY, FIRST)):
        assert ruling == Ruling(Verdict.REFUSED, "the delta is not finite", "unusable")
    assert question.participants[FIRST].phase is ClientPhase.FAILED


def test_a_reply_that_could_not_be_stored_may_come_again() -> None:
    exchange = asked()
    exchange.take(FIRST)
    exchange.put_back(FIRST)
    assert exchange.judge(FIRST) is ReplyState.OPEN


def test_older_exchanges_are_late_and_those_to_come_are_unknown() -> None:
    history = open_history()
    assert history.judge(KEY._replace(round_num=4, attempt=9), FIRST) == LATE
    assert history.judge(KEY._replace(round_num=6), FIRST) is ReplyState.UNKNOWN
    assert history.judge(KEY._replace(kind="EvaluateRequest"), FIRST) is ReplyState.UNKNOWN


def test_another_runs_reply_and_a_strangers_are_refused() -> None:
    of_another = open_history().judge(KEY._replace(run_id="other"), FIRST)
    for ruling in (of_another, asked().judge(ClientId(9))):
        assert isinstance(ruling, Ruling)
        assert ruling.verdict is Verdict.REFUSED


def test_an_exchange_that_is_opened_again_has_no_verdicts_yet() -> None:
    history = open_history()
    history.remember(KEY, {FIRST: ACCEPTED})
    assert history.is_past(KEY)
    history.open(KEY)
    assert not history.is_past(KEY)
    assert history.judge(KEY, FIRST) is ReplyState.UNKNOWN


def test_the_verdicts_on_many_small_questions_are_known_for_long() -> None:
    """A client may ask hours later. Control: of many large questions, the oldest are dropped."""
    for num_clients, is_known in (1, True), (1000, False):
        history = VerdictHistory("run")
        for exchange in range(100):
            key = KEY._replace(exchange=exchange)
            history.remember(key, {ClientId(each): ACCEPTED for each in range(num_clients)})
        assert history.is_past(KEY._replace(exchange=0)) == is_known
        assert history.is_past(KEY._replace(exchange=70))


def test_a_phase_does_not_change_once_the_reply_is_here() -> None:
    exchange = asked()
    exchange.move(FIRST, ClientPhase.TRAINING, now_s=1.0)
    exchange.move(FIRST, ClientPhase.TRAINING, now_s=2.0)
    assert exchange.participants[FIRST].since_s == 1.0
    exchange.take(FIRST)
    exchange.log(FIRST, now_s=3.0)
    exchange.move(FIRST, ClientPhase.GONE, now_s=4.0)
    assert exchange.participants[FIRST].phase is ClientPhase.REPORTED
    exchange.consume(ruling=ACCEPTED, failed=True)
    assert exchange.participants[FIRST].phase is ClientPhase.FAILED


def test_the_name_of_a_folder_tells_the_key() -> None:
    assert TaskKey.of_folder("run", KEY.folder) == KEY
