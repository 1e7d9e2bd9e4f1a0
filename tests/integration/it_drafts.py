"""Drafting: the same tokens and logits, only faster; on where it pays, off where it does not."""

import os
import subprocess

from daemon import BUILD, check, equal, scratch
from faults import SANITIZED
from talk import Box, Talk, case, run_cases, tokens


def made(*options):
    path = os.path.join(scratch(), "model")
    subprocess.run([os.path.join(BUILD, "tools", "mkmodel"), "--config", "tiny", *options, path],
                   check=True, stdout=subprocess.DEVNULL)
    return path


def start(model, draft):
    return Box("cpu", {"engine.model_dir": model, "engine.draft": draft}).start()


def answers(box, prompt, forced):
    """Greedy, sampled, with a stop token in the middle, cut short, and forced."""
    bits = []
    for number, how in enumerate((
            {}, {"temperature": 0.8, "seed": 7}, {"temperature": 1.5, "top_k": 40, "seed": 8},
            {"ignore_eos": False, "stop_tokens": [(prompt[-1] + 9) % 500, 17, 90, 300]},
            {"forced": forced})):
        talk = Talk(box.client(), f"s{number}")
        talk.prefill(prompt)
        for count in (1, 2, 7, 21):
            if "forced" in how and count != 21:
                continue
            answer = talk.decode(count, **how)
            bits.append((answer.bits, answer.first, answer.end.finish, answer.end.head_position,
                         [c.position for c in answer.end.checkpoints]))
        talk.close()  # The next one resumes from what the drafts left behind.
        bits.append(talk.decode(5).bits)
    return bits


def drafted(box):
    return {result: box.counter("cached_engine_drafts_total", f'result="{result}"')
            for result in ("accepted", "refused")}


@case
def output_does_not_depend_on_drafting():
    for options in ((), ("--bigram",)):
        model = made(*options)
        prompt, forced = tokens(90), tokens(21)
        plain, drafts = start(model, "off"), start(model, "on")
        equal(answers(drafts, prompt, forced), answers(plain, prompt, forced), f"bits with {options}")
        equal(drafted(plain), {"accepted": 0, "refused": 0}, "off is off")
        check(sum(drafted(drafts).values()) > 0, "on is on")
        plain.stop()
        drafts.stop()


@case
def right_drafts_give_several_tokens_a_step():
    box = start(made("--bigram"), "on")
    talk = Talk(box.client(), "s")
    prompt = list(range(20, 90))  # What the weights know: each id is followed by the next.
    talk.prefill(prompt)
    before = box.counter("cached_engine_passes_total")
    answer = talk.decode(120)
    passes = box.counter("cached_engine_passes_total") - before
    equal(answer.tokens, list(range(90, 210)), "the next ones")
    print(f"{len(answer.tokens) / passes:.2f} tokens a step, {drafted(box)}")
    check(len(answer.tokens) >= 2 * passes, f"two tokens a step at least: {passes} passes")
    box.stop()


@case
def wrong_drafts_switch_themselves_off():
    """Random weights: hardly a draft is right."""
    box = start(made(), "auto")
    talk = Talk(box.client(), "s")
    talk.prefill(tokens(60))
    answer = talk.decode(600, temperature=1.0, seed=3)
    equal(len(answer.tokens), 600, "all of it")
    count = sum(drafted(box).values())
    print(f"{count:.0f} drafts for 600 tokens: {drafted(box)}")
    check(count > 0, "tried")
    if not SANITIZED:  # Under a sanitizer a step costs what it costs nowhere else.
        check(count < 150, "then off")
    box.stop()


run_cases(__doc__)
