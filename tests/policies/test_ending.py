import pytest

from simckpt.errors import ConfigurationError
from simckpt.policies import EverySteps, Moment, OnBest, OnException, OnSignal, grace_of, signals_of


def test_on_signal_answers_sigterm_and_sigusr1_unless_told_otherwise() -> None:
    for name in ("SIGTERM", "SIGUSR1"):
        assert OnSignal().decide(Moment(10, 0, signal=name)).reason == f"{name} asks the process to end"
    assert not OnSignal().decide(Moment(10, 0, signal="SIGUSR2")).due
    assert OnSignal("SIGUSR2").decide(Moment(10, 0, signal="SIGUSR2")).due
    assert not OnSignal("SIGUSR2").decide(Moment(10, 0, signal="SIGTERM")).due
    assert not OnSignal().decide(Moment(10, 0)).due


def test_on_exception_names_what_ended_the_loop() -> None:
    assert not OnException().decide(Moment(10, 0, signal="SIGTERM")).due
    decision = OnException().decide(Moment(10, 0, exception="ZeroDivisionError: division by zero"))
    assert decision.reason == "the loop ended with ZeroDivisionError: division by zero"


def test_the_signals_of_a_policy_are_found_wherever_they_are_joined() -> None:
    assert signals_of(EverySteps(5) | OnException()) == ()
    assert signals_of(OnSignal()) == ("SIGTERM", "SIGUSR1")
    assert signals_of((EverySteps(5) & OnBest("r")) | OnSignal("SIGUSR2", grace=120)) == ("SIGUSR2",)


def test_several_signal_policies_give_the_shortest_grace_and_each_name_once() -> None:
    policy = OnSignal("SIGUSR1", "SIGUSR1", grace=120) | EverySteps(5) | OnSignal(grace=25.0)
    assert signals_of(policy) == ("SIGUSR1", "SIGTERM")


def test_each_signal_has_a_grace_of_its_own() -> None:
    policy = OnSignal("SIGUSR1", grace=120) | EverySteps(5) | OnSignal("SIGTERM") | OnSignal("SIGTERM", grace=20)
    assert grace_of(policy, "SIGUSR1") == 120
    assert grace_of(policy, "SIGTERM") == 20


@pytest.mark.parametrize("name", ["SIGNONSENSE", "", 15, None, "SIG_DFL"])
def test_an_unknown_signal_is_refused(name: object) -> None:
    with pytest.raises(ConfigurationError):
        OnSignal(name)


def test_a_short_name_is_refused_with_the_long_one() -> None:
    with pytest.raises(ConfigurationError, match="write 'SIGTERM'"):
        OnSignal("TERM")


@pytest.mark.parametrize("name", ["SIGKILL", "SIGSTOP", "SIGSEGV", "SIGFPE"])
def test_a_signal_that_cannot_be_answered_is_refused(name: str) -> None:
    with pytest.raises(ConfigurationError, match=name):
        OnSignal(name)


@pytest.mark.parametrize("ending", [OnSignal(), OnException(), EverySteps(5) | OnSignal()])
def test_the_end_of_the_loop_waits_for_no_other_condition(ending) -> None:
    for join in (lambda: ending & EverySteps(5), lambda: EverySteps(5) & ending):
        with pytest.raises(ConfigurationError, match="instead of &"):
            join()
