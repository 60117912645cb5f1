"""The models of the protocols: every state is visited, and whatever is taken away from one is found missing.

Spin makes a C program of a model that visits all its states (spinroot.com). What a model leaves out, and what each of its
switches takes away, its first lines say.
"""

import random
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

MODELS = Path(__file__).parent


def at_length(*values: object) -> object:
    """Of a search of many states, which `tests/run.sh --long` makes."""
    return pytest.param(*values, marks=pytest.mark.long)


def named(value: object) -> str | None:
    """How a parameter is shown in the names of tests: switches by themselves."""
    return (" ".join(value) or "plain") if isinstance(value, tuple) else None


DEEPEST = 2_000_000  # steps; a search that would go deeper counts as a failure
pytestmark = pytest.mark.skipif(shutil.which("spin") is None, reason="needs spin; scripts/setup.sh installs it")


@dataclass
class Search:
    errors: int
    states: int
    output: str


def search(folder: Path, model: str, *switches: str, claim: str = "", fairly: bool = False, ends: bool = False,
           soon: bool = False) -> Search:
    """Visits all states of a model, in search of a failed assertion or, with a claim, of a run that breaks it.

    `fairly` leaves out runs in which somebody who could go on for ever never does. `ends` also searches for a run that never
    ends; the states are then counted with and without what looks for it. `soon`: it will find one before long, so that to
    compile what searches well would take longer than to search.
    """
    def run(*command: str) -> str:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    defined = [f"-D{switch}" for switch in switches]
    run("spin", *defined, "-a", str(MODELS / f"{model}.pml"))
    kind, how = ("-DNFAIR=4", ["-a", "-f"]) if fairly else ("-DNP", ["-l"]) if ends else ("-DSAFETY", [])
    run("cc", "-O0" if soon else "-O1", "-o", "pan", "pan.c", kind, *([] if claim else ["-DNOCLAIM"]))
    output = run("./pan", f"-m{DEEPEST}", *how, *(["-N", claim] if claim else []))
    assert "depth too small" not in output, output
    found = re.search(r"errors: (\d+)\n\s*(\d+) states, stored", output)
    assert found, output
    result = Search(int(found[1]), int(found[2]), output)
    print(f"{model} {' '.join(switches)} {claim}: {result.states} states")
    return result


def assert_sound(visited: Search, at_least: int = 0) -> None:
    """Nothing was found wrong, and the model did not shrink to nothing."""
    assert visited.errors == 0, visited.output
    assert visited.states > at_least


def assert_wrong(violated: str, folder: Path, model: str, *switches: str, claim: str = "") -> None:
    """A run is found that goes wrong, in this way."""
    visited = search(folder, model, *switches, claim=claim, soon=True)
    assert visited.errors == 1, visited.output
    found = re.search(r"pan:1: (.*) \(at depth", visited.output)
    assert found, visited.output
    assert violated in found[1]


#: The handover with launches that are left to the submitter; three demands show nothing that two do not, in three times
#: the states.
DEFERRED = ("DEFERRED", "DEMANDS=2")
#: The same where scheduling is fair; two launches in a micro-batch show nothing that one does not, in twice the states.
DEFERRED_FAIRLY = (*DEFERRED, "LAUNCHES=1")


@pytest.mark.parametrize("switches", [(), ("FENCED",)], ids=named)
def test_nothing_is_launched_while_the_gate_is_proven_closed(tmp_path, switches):
    assert_sound(search(tmp_path, "gate", *switches), at_least=10_000)


def test_without_a_barrier_the_gates_proof_is_none(tmp_path):
    assert_wrong("!(proven)", tmp_path, "gate", "NO_BARRIER")


@pytest.mark.parametrize("switches", [(), ("FENCED",)], ids=named)
def test_whoever_a_gate_has_held_goes_on(tmp_path, switches):
    assert_sound(search(tmp_path, "gate", "THREADS=2", "PAUSES=1", *switches, claim="goes_on", fairly=True))


@pytest.mark.parametrize("switches", [(), ("DEATH",), DEFERRED], ids=named)
def test_no_launch_meets_memory_that_is_the_servers(tmp_path, switches):
    assert_sound(search(tmp_path, "handover", *switches), at_least=90_000)


@pytest.mark.parametrize("switches", [(), DEFERRED], ids=named)
def test_nothing_is_dropped_of_a_micro_batch_that_has_its_memory(tmp_path, switches):
    assert_sound(search(tmp_path, "handover", *switches, claim="spares"))


@pytest.mark.parametrize("claim, switches", [("served", ()), ("served", DEFERRED_FAIRLY), ("trains", ()),
                                             at_length("trains", DEFERRED_FAIRLY)], ids=named)
def test_demands_are_answered_and_training_goes_on(tmp_path, claim, switches):
    assert_sound(search(tmp_path, "handover", "PATIENT", *switches, claim=claim, fairly=True))


@pytest.mark.parametrize("switches", [(), DEFERRED], ids=named)
@pytest.mark.parametrize("switch, violated, claim", [
    ("NO_RECHECK", "!(lost)", ""),
    ("NO_ABORT", "owner==", ""),
    ("NO_DRAIN", "owner==", ""),
    ("NO_VICTIM", "dropped_new", "spares"),
])
def test_each_part_of_the_handover_is_needed(tmp_path, switch, violated, claim, switches):
    assert_wrong(violated, tmp_path, "handover", switch, *switches, claim=claim)


@pytest.mark.parametrize("switch, violated", [
    ("NO_STALE", "owner=="),
    ("NO_FLUSH", "!(lost)"),
    ("NO_GROUP", "owner=="),
    ("NO_VERDICT", "owner=="),
    ("NO_WAIT", "owner=="),
])
def test_each_part_of_deferred_submission_is_needed(tmp_path, switch, violated):
    assert_wrong(violated, tmp_path, "handover", switch, *DEFERRED)


@pytest.mark.parametrize("switches", [(), at_length(("PAUSES=2",)), ("INSIDE=2",), ("DEATH", "BATCHES=1"),
                                      ("RANKS=3", "PAUSERS=2", "BATCHES=1"), ("FREE",), ("FREE", "PAUSES=2", "BATCHES=1"),
                                      at_length(("FREE", "DEATH", "BATCHES=1")), ("FREE", "RANKS=3", "PAUSERS=2", "BATCHES=1"),
                                      ("JOIN",), at_length(("JOIN", "DEATH", "BATCHES=1")),
                                      ("JOIN", "RANKS=3", "PAUSERS=2", "BATCHES=1")], ids=named)
def test_ranks_stop_at_one_cut_and_all_go_on(tmp_path, switches):
    assert_sound(search(tmp_path, "cut", *switches), at_least=100_000)


@pytest.mark.parametrize("switch, violated", [
    ("NO_WORD", "launched"),
    ("NO_DEBT", "launched"),
    ("NO_EPOCH", "work"),
    ("NO_COMMIT", "work"),
    ("NO_RETRY", "invalid end state"),
])
def test_each_part_of_the_cut_is_needed(tmp_path, switch, violated):
    assert_wrong(violated, tmp_path, "cut", switch)


@pytest.mark.parametrize("switches, violated", [
    (("FREE", "NO_CATCH_UP"), "launched"),
    (("FREE", "LOOK_FIRST"), "invalid end state"),
    (("JOIN", "ARRIVE_FIRST"), "arrived"),
])
def test_each_part_of_waiting_only_when_needed_is_needed(tmp_path, switches, violated):
    assert_wrong(violated, tmp_path, "cut", *switches)


#: Longer runs than can be visited in all their states.
LONG = ("BATCHES=4", "PAUSES=3", "INSIDE=2")
RUNS = 50


def replayed(folder: Path, build: Path, run: int, ranks: int, *switches: str) -> str:
    """What the code says when it makes the steps of a run of the cut's model: how many, or the first difference. The run of a
    wrong model may end with what is wrong."""
    trace = subprocess.run(["spin", "-T", f"-n{run}", "-u10000", "-DTRACE", f"-DRANKS={ranks}", *(f"-D{each}" for each in LONG),
                            *(f"-D{switch}" for switch in switches), str(MODELS / "cut.pml")],
                           cwd=folder, capture_output=True, text=True, check=False)
    needed = "free" if "FREE" in switches else "needed"
    done = subprocess.run([build / "bin" / "sluice_cut_trace", str(ranks), needed], input=trace.stdout, capture_output=True,
                          text=True, check=False)
    assert done.returncode in (0, 1), done.stderr
    return done.stdout


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("switches", [(), ("FREE",)], ids=named)
def test_the_code_does_what_the_model_of_the_cut_does(tmp_path, build, switches, ranks):
    first = random.randrange(1, 1 << 20)
    for run in range(first, first + RUNS):
        said = replayed(tmp_path, build, run, ranks, *switches)
        assert re.fullmatch(r"(\d{2,}) steps\n", said), f"spin -n{run}: {said}"


@pytest.mark.parametrize("switches", [("NO_WORD",), ("NO_DEBT",), ("NO_EPOCH",), ("NO_COMMIT",), ("NO_RETRY",),
                                      ("FREE", "NO_CATCH_UP")], ids=named)
def test_the_code_does_not_do_what_a_wrong_model_does(tmp_path, build, switches):
    assert any("steps" not in replayed(tmp_path, build, run, 2, *switches) for run in range(1, 4 * RUNS))


@pytest.mark.parametrize("switches", [(), ("INSIDE=2",), at_length(("BATCHES=1", "SHORT=1")), ("DEATH", "BATCHES=1", "TAKEN=1"),
                                      ("RANKS=3", "TAKEN=1", "BATCHES=1")], ids=named)
def test_ranks_keep_the_same_micro_batches(tmp_path, switches):
    assert_sound(search(tmp_path, "together", *switches), at_least=100_000)


@pytest.mark.parametrize("switches, violated", [
    (("NO_TELL",), "work"),
    (("TELL_FIRST",), "work"),
    (("NO_BEGIN",), "work_of"),
    (("NO_BACK", "SHORT=1", "BATCHES=1"), "work_of"),
    (("NO_DEBT",), "work_of"),
    (("NO_AGAIN",), "work"),
])
def test_each_part_of_keeping_them_together_is_needed(tmp_path, switches, violated):
    assert_wrong(violated, tmp_path, "together", *switches)


@pytest.mark.parametrize("switches", [at_length(("TAKEN=2",)), ("SHORT=1",), ("DEATH",), ("BETWEEN=D",),
                                      ("PAIR", "TAKEN=2", "BATCHES=2"),
                                      at_length(("PAIR", "TAKEN=2", "INSIDE=3", "OF_ALL")), at_length(("RING",)),
                                      at_length(("GRID",)),
                                      at_length(("PRESENT", "TAKEN=2")), at_length(("PRESENT", "GRID")), ("CONTROL", "PRESENT"),
                                      at_length(("CONTROL", "PRESENT", "PAIR", "TAKEN=2")),
                                      at_length(("CONTROL", "PRESENT", "DEATH"))], ids=named)
def test_ranks_of_several_communicators_keep_the_same_micro_batches(tmp_path, switches):
    assert_sound(search(tmp_path, "domain", *switches), at_least=100_000)


@pytest.mark.parametrize("switches", [(), ("TAKEN=0", "SHORT=1"), ("PAIR", "TAKEN=2", "INSIDE=3"), ("PRESENT",),
                                      at_length(("CONTROL", "PRESENT"))], ids=named)
def test_no_micro_batch_of_several_communicators_runs_again_for_ever(tmp_path, switches):
    assert_sound(search(tmp_path, "domain", *switches, ends=True), at_least=100_000)


@pytest.mark.parametrize("switches, violated", [
    (("NO_RAISE",), "invalid end state"),
    (("SET",), "work_of"),
    (("OLD_LOOK",), "work_of"),
    (("PRESENT", "OLD_LOOK"), "work_of"),
    (("NO_LOOK", "RING", "TAKEN=2"), "invalid end state"),
    (("NO_LOOK", "GRID", "TAKEN=2"), "invalid end state"),
    (("NO_STOP",), "work_of"),
    (("NO_RELOOK",), "work_of"),
    (("NO_BEGIN",), "work_of"),
    (("NO_BACK",), "work_of"),
    (("NO_MOVE", "TAKEN=0", "SHORT=1"), "work_of"),
    (("BACK_FIRST", "TAKEN=0", "SHORT=1", "INSIDE=3"), "work"),
    (("NO_TELL",), "invalid end state"),
    (("NO_DEBT",), "work_of"),
    (("NO_AGAIN", "BETWEEN=D"), "invalid end state"),
    (("CONTROL", "PRESENT", "NO_FOLLOW"), "lost"),
])
def test_each_part_of_keeping_several_communicators_together_is_needed(tmp_path, switches, violated):
    assert_wrong(violated, tmp_path, "domain", *switches)


@pytest.mark.parametrize("switches", [("RANKS=2", "PAUSERS=2"), at_length(("RANKS=2", "PAUSERS=2", "ROUNDS=3")), ("ROUNDS=1",),
                                      ("RANKS=2", "CROSS", "ROUNDS=1")], ids=named)
def test_no_paused_rank_is_waited_for_by_what_others_exchange(tmp_path, switches):
    assert_sound(search(tmp_path, "exchanges", *switches), at_least=100_000)


@pytest.mark.parametrize("switches, violated", [
    (("NO_VERSION", "RANKS=2"), "needs"),
    (("NO_DEBT", "RANKS=2"), "needs"),
    (("NO_PROGRESS", "RANKS=2"), "needs"),
    (("NO_MUTUAL",), "needs"),
    (("ONE_BY_ONE", "CROSS", "RANKS=2", "ROUNDS=1"), "invalid end state"),
])
def test_each_part_of_exchanges_is_needed(tmp_path, switches, violated):
    assert_wrong(violated, tmp_path, "exchanges", *switches)


#: One micro-batch and one turn of the other thread: two of each show nothing more, in ten times the states.
PAUSE = ("BATCHES=1", "TURNS=1")
#: On a GPU: whoever launches waits himself, or leaves it to a submitter.
PAUSE_DIRECT = ("DRIVER", "DIRECT")


@pytest.mark.parametrize("switches", [(), PAUSE_DIRECT, ("DRIVER",),
                                      at_length(("DRIVER", "DEFERRED", "QUEUE=1", "PARTS=1"))], ids=named)
def test_pauses_demands_and_commits_do_not_wait_for_each_other(tmp_path, switches):
    assert_sound(search(tmp_path, "pause", *PAUSE, *switches), at_least=1_000_000)


@pytest.mark.parametrize("switches", [(), PAUSE_DIRECT, at_length(("DRIVER",))], ids=named)
def test_each_demand_is_answered_and_each_micro_batch_committed_in_the_end_beside_a_pause(tmp_path, switches):
    assert_sound(search(tmp_path, "pause", *PAUSE, *switches, ends=True), at_least=1_000_000)


@pytest.mark.parametrize("switches, violated", [
    (("NO_LEAVE",), "invalid end state"),
    (("NO_FIRST",), "invalid end state"),
    (("WAIT_GRANTABLE",), "invalid end state"),
    (("WAIT_COMMIT",), "invalid end state"),
    (("NO_URGENT",), "invalid end state"),
    (("ONLY_COMMIT",), "invalid end state"),
    (("NO_RECHECK",), "phase!="),
    (("NO_IDLE",), "computing=="),
    (("PASS_BACK",), "computing=="),
    ((*PAUSE_DIRECT, "NO_FIRST"), "invalid end state"),
    ((*PAUSE_DIRECT, "WAIT_GRANTABLE"), "invalid end state"),
    ((*PAUSE_DIRECT, "WAIT_COMMIT"), "invalid end state"),
    ((*PAUSE_DIRECT, "OWN_WAITS"), "invalid end state"),
    ((*PAUSE_DIRECT, "LET_FIRST"), "invalid end state"),
    ((*PAUSE_DIRECT, "NO_URGENT"), "invalid end state"),
    ((*PAUSE_DIRECT, "NO_RECHECK"), "phase!="),
    ((*PAUSE_DIRECT, "NO_IDLE"), "inside=="),
    (("DRIVER", "ONLY_COMMIT"), "invalid end state"),
])
def test_each_part_of_not_waiting_beside_a_pause_is_needed(tmp_path, switches, violated):
    assert_wrong(violated, tmp_path, "pause", *PAUSE, *switches)


@pytest.mark.parametrize("switches", [(), ("NEEDS=1",), ("SUCCESSION",), ("DEATH",), at_length(("SERVES=2",)),
                                      at_length(("SUCCESSION", "KILLS=2")), at_length(("NEEDS=1", "DEATH"))], ids=named)
def test_what_is_parked_comes_back_as_it_was_and_nobody_launches_before(tmp_path, switches):
    assert_sound(search(tmp_path, "parking", *switches), at_least=100_000)


@pytest.mark.parametrize("claim, switches", [("served", ()), ("runs0", ()), ("runs1", ()), at_length("runs0", ("SUCCESSION",)),
                                             at_length("runs1", ("SUCCESSION",))], ids=named)
def test_of_two_that_have_no_room_beside_each_other_each_runs_again_and_again(tmp_path, claim, switches):
    assert_sound(search(tmp_path, "parking", "PATIENT", *switches, claim=claim, fairly=True), at_least=10_000)


@pytest.mark.parametrize("claim, switches", [("runs0", ()), ("runs1", ()), at_length("runs0", ("NEEDS=1",)),
                                             at_length("runs1", ("NEEDS=1",))], ids=named)
def test_beside_a_server_that_never_has_enough_each_runs_again_and_again(tmp_path, claim, switches):
    assert_sound(search(tmp_path, "parking", "PATIENT", "BUSY", *switches, claim=claim, fairly=True), at_least=10_000)


@pytest.mark.parametrize("switches", [("NO_TURN",), ("NO_KEEP", "NEEDS=1")], ids=named)
def test_each_part_of_giving_back_what_is_owed_is_needed(tmp_path, switches):
    visited = search(tmp_path, "parking", "PATIENT", "BUSY", *switches, claim="runs0", fairly=True)
    assert visited.errors == 1 and "acceptance cycle" in visited.output, visited.output


@pytest.mark.parametrize("switches, violated", [
    (("NO_DONE",), "holds["),
    (("NO_SLOT", "NEEDS=1"), "slot_owner[to]"),
    (("NO_SWEEP", "DEATH"), "slot_owner[0]"),
    (("NO_ALL",), "holds["),
])
def test_each_part_of_parking_is_needed(tmp_path, switches, violated):
    assert_wrong(violated, tmp_path, "parking", *switches)


@pytest.mark.parametrize("claim, switch", [("runs1", "NO_WHOLE"), ("runs1", "NO_YIELD"), ("runs0", "NO_LOOK"), ("runs0", "NO_STAY")])
def test_each_part_of_taking_turns_is_needed(tmp_path, claim, switch):
    visited = search(tmp_path, "parking", "PATIENT", switch, claim=claim, fairly=True)
    assert visited.errors == 1 and "acceptance cycle" in visited.output, visited.output
