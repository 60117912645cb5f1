"""What the demonstration shows: its table, and what of its claims did not happen. Pure functions of the results."""

from demonstration.phases import Setting, Together, Training

MIB = 1 << 20
FEWEST_LEFT_PERCENT = 1.0  # of the training rate alone; less is a job that stands still


def number(value: float | None, digits: int = 1) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def latency(summary: dict, model: str, kind: str) -> str:
    """p50 / p99 (n) in milliseconds."""
    values = summary["models"][model][f"{kind}_ms"]
    return f"{number(values['p50'])} / {number(values['p99'])} ({values['n']})" if values["n"] else "none"


def percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def mib(value: float) -> str:
    return f"{value / MIB:.0f} MiB"


def answers(summary: dict) -> str:
    models = summary["models"].values()
    return f"{sum(m['right'] for m in models)} of {sum(m['sent'] for m in models)}"


def loss_difference(alone: Training, both: Training) -> float:
    """Relative."""
    return abs(both.final["loss"] - alone.final["loss"]) / abs(alone.final["loss"])


def flowed_back(looks: list[dict]) -> bool:
    """Whether training, once it had given memory to serving, was later seen with more while serving had less."""
    gave = [(a, b) for a, b in zip(looks, looks[1:]) if b["training"] < a["training"] and b["serving"] > a["serving"]]
    return any(later["training"] > given["training"] and later["serving"] < given["serving"]
               for _, given in gave for later in looks[looks.index(given):])


def rows(setting: Setting, alone: Training, serving: dict, both: Together) -> list[tuple[str, str, str]]:
    """Label, value alone, value together."""
    training, handovers = both.training, both.status["handovers"]
    waited = handovers["latency_us"]
    share = training.samples_per_s / alone.samples_per_s
    result = [
        ("", "alone", "together"),
        ("training, samples/s", number(alone.samples_per_s), f"{number(training.samples_per_s)} ({share:.0%})"),
        (f"loss after {alone.steps} steps", f"{alone.final['loss']:.6f}", f"{training.final['loss']:.6f}"),
        ("micro-batches discarded", str(alone.final["discards"]), str(training.final["discards"])),
        ("most micro-batches in a step", str(max(alone.slices)), str(max(training.slices))),
    ]
    for model in setting.rates:
        result += [(f"{model}, {kind}: p50 / p99 ms (n)", *(latency(load, model, kind) for load in (serving, both.load)))
                   for kind in ("warm", "cold")]
    result += [
        ("answers right", answers(serving), answers(both.load)),
        ("handovers", "", str(handovers["count"])),
        ("handover p50 / p99 ms", "", f"{number(milliseconds(waited.get('p50')), 2)} / "
                                      f"{number(milliseconds(waited.get('p99')), 2)}"),
        ("moved to serving, to training", "", f"{mib(handovers['bytes_to_serving'])}, "
                                              f"{mib(handovers['bytes_to_training'])}"),
    ]
    for model in served(setting, both):
        result.append((f"{model['name']}: SLO attainment", "", f"predicted {percent(model['predicted_attainment'])}, "
                                                               f"observed {percent(model['observed_attainment'])}"))
    return result


def milliseconds(microseconds: float | None) -> float | None:
    return None if microseconds is None else microseconds / 1e3


def served(setting: Setting, both: Together) -> list[dict]:
    return [model for model in both.status.get("models", []) if model["name"] in setting.rates]


def as_text(table: list[tuple[str, str, str]]) -> str:
    widths = [max(len(row[column]) for row in table) for column in range(3)]
    lines = ["  ".join((row[0].ljust(widths[0]), row[1].rjust(widths[1]), row[2].rjust(widths[2]))).rstrip()
             for row in table]
    return "\n".join([lines[0], "-" * (sum(widths) + 4), *lines[1:]])


def shortfalls(setting: Setting, alone: Training, serving: dict, both: Together) -> list[str]:
    """What should have happened and did not, a sentence each."""
    training, handovers = both.training, both.status["handovers"]
    found = []

    def claim(holds: bool, otherwise: str) -> None:
        if not holds:
            found.append(otherwise)

    for phase, summary in (("alone", serving), ("beside training", both.load)):
        for model, result in summary["models"].items():
            claim(result["right"] > 0, f"{model} {phase} gave no right answer")
            claim(result["wrong"] == 0, f"{model} {phase} gave {result['wrong']} wrong answers, off by up to "
                                        f"{result['max_error']}, where {setting.tolerance} is allowed")
            claim(result["failed"] == 0, f"{model} {phase} failed {result['failed']} requests, first with: "
                                         f"{result['first_error']}")
    claim(any(result["cold_ms"]["n"] for result in both.load["models"].values()),
          "no request beside training met a cold model")
    claim(handovers["count"] > 0, "no memory was handed over")
    claim(handovers["bytes_to_serving"] > 0, "no memory went from training to serving")
    claim(flowed_back(both.looks), "no memory was seen to flow back from serving to training")
    claim(training.final["discards"] > 0 or max(training.slices) > max(alone.slices),
          "training never had to discard a micro-batch or to make one smaller")
    claim(training.steps == alone.steps, f"training made {training.steps} steps beside serving, {alone.steps} alone")
    claim(training.samples_per_s >= alone.samples_per_s * FEWEST_LEFT_PERCENT / 100, "training stood still")
    difference = loss_difference(alone, training)
    claim(difference <= setting.loss_tolerance,  # also if it is not a number
          f"the loss differs by {difference:.1e} of itself, where {setting.loss_tolerance:g} is rounding")
    named = {model["name"]: model for model in served(setting, both)}
    for model in setting.rates:
        for kind in ("predicted", "observed"):
            claim(named.get(model, {}).get(f"{kind}_attainment") is not None, f"{model} has no {kind} attainment")
    return found
