"""Mails: content, language, and names of jobs that cannot inject headers, markup or lines."""

from __future__ import annotations

import html.parser
import re
import tomllib
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from zombie_samples import HOSTILE, NOW, evidence, gpu, job, node, orphan, squatter

from slurm_affinode.base.errors import InputError
from slurm_affinode.model.cleanup import Action, Interactive, MailPolicy, Settings, Stages
from slurm_affinode.model.finding import IDLE_KINDS, KINDS, QueueImpact
from slurm_affinode.report import mail as mail_module
from slurm_affinode.report.mail import Digest, address_of, digest, message

TEXTS = Path(__file__).resolve().parents[3] / "reports" / "mail"
STAGES = Stages(3600.0, 6300.0, 7200.0)
SETTINGS = Settings(action="cancel", fixed=STAGES, sliding=STAGES)


def action(number: int = 1, verb: str = "warn-user", **values: object) -> Action:
    finding = squatter(advice="End the job.", **values)
    return Action(verb, finding, "due", "idle", "rule", number, SETTINGS)  # type: ignore[arg-type]


def mail(*actions: Action, policy: MailPolicy | None = None, user: str | None = "alice") -> Digest:
    return digest(
        actions or (action(),), policy or MailPolicy(), recipient="alice@example.org", user=user, now=NOW,
        timezone="UTC", keep_s=7200.0,
    )  # fmt: skip


class Tags(html.parser.HTMLParser):
    """Collects the elements and attributes of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.seen: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen += [tag, *(name for name, _ in attrs)]


def test_warning_states_evidence_and_next_action() -> None:
    """The mail also contains instructions for the reader."""
    result = mail()
    assert result.subject == "[alpha] GPUs of job 7 are idle"
    for text in (result.text, result.html):
        assert "Warning 1 of 2" in text
        assert "2026-11-18 13:00 UTC" in text  # one hour between this warning and the cancellation
        assert "77.0 / 80 GiB" in text
        assert "memory speaks against it" in text
        assert "scancel 7" in text
    assert 'slurm-affinode keep 7 --for 2h --why "..."' in result.text


def test_last_warning_and_canceled_job_are_named_as_such() -> None:
    """A mail about a finished action suggests no commands."""
    assert "Last warning" in mail(action(2)).text
    done = mail(action(0, "cancel"))
    assert done.subject == "[alpha] Job 7 was canceled"
    assert "scancel" not in done.text
    assert "when it has nothing to compute" in done.text
    suspended = mail(action(0, "suspend")).text
    assert "Its state is being saved" in suspended
    assert "End the job" not in suspended + mail(action(0, "cancel")).text
    assert mail(action(0, "cancel"), action(0, "cancel")).subject == "[alpha] 2 of your jobs were canceled"


def test_warning_announces_only_actions_that_will_happen() -> None:
    """Interactive jobs get extra time; a job that uses some of its GPUs is not canceled."""
    settings = replace(SETTINGS, interactive=Interactive(extra_s=7200.0))
    subject = job(batch=False)
    longer = mail(replace(action(2, subject=subject), settings=settings))
    assert "2026-11-18 13:00 UTC" in longer.text
    assert "2026-11-18 12:15 UTC" in mail(action(2)).text
    asleep = mail(replace(action(), suspends=True))
    assert "it will be suspended after 2026-11-18 13:00 UTC" in asleep.text
    partly = mail(action(gpus=(gpu(), gpu(1, flagged=False)), allocated_gpus=2))
    assert "No action will be taken." in partly.text


def test_mail_combines_all_findings_of_a_recipient() -> None:
    """The findings are about jobs, processes and nodes."""
    second = action(0, subject=job(job_id=8, id="8_1", name="b"))
    result = mail(action(), second)
    assert result.subject == "[alpha] 2 of your jobs and GPUs need attention"
    assert "Job 7 (train)" in result.text
    assert "Job 8_1 (b)" in result.text
    admins = mail(*(Action("warn-admin", item, "due", "x") for item in (orphan(), node())), user=None)
    assert "Process 4242 on n1" in admins.text
    assert "Node n1" in admins.text
    assert "administrators of alpha" in admins.text


def test_unmeasured_values_are_not_shown_as_zero() -> None:
    blind = gpu(held_gib=None, peak_pct=None, measured=False, idle_s=None)
    result = mail(action(gpus=(blind,), evidence=(evidence("power", met=False, unknown=True, text="no power"),)))
    assert result.text.count("unknown") == 3
    assert "no power" in result.text


def test_mail_is_in_the_language_of_the_recipient() -> None:
    """Texts missing in a language are in English."""
    policy = MailPolicy(language="en", languages={"alice": "de"})
    german = mail(policy=policy)
    assert "Guten Tag alice" in german.text
    assert 'lang="de"' in german.html
    assert "Hello bob" in mail(policy=policy, user="bob").text
    assert "Hello alice" in mail(policy=MailPolicy(language="fr")).text


def test_every_language_has_all_texts_and_placeholders() -> None:
    """The texts cover every kind of finding."""
    catalogues = {path.name: tomllib.loads(path.read_text()) for path in TEXTS.glob("texts.*.toml")}
    english = catalogues["texts.en.toml"]
    for texts in catalogues.values():
        for phrase, text in texts.pop("phrases", {}).items():
            assert sorted(re.findall(r"\{\w+\}", text)) == sorted(re.findall(r"\{\w+\}", phrase)), phrase
    assert set(english["kinds"]) >= set(KINDS)
    for texts in catalogues.values():
        assert set(texts) == set(english)
        for table in ("kinds", "kinds_ended"):
            assert set(texts[table]) == set(english[table])
        assert set(texts["kinds_ended"]) < set(texts["kinds"])
        for key, text in texts.items():
            if isinstance(text, str):
                assert sorted(re.findall(r"\{\w+\}", text)) == sorted(re.findall(r"\{\w+\}", english[key])), key


def test_site_can_override_texts_and_templates(tmp_path: Path) -> None:
    """Other texts keep their default; an error in a template is reported with its line."""
    (tmp_path / "texts.en.toml").write_text('hello = "Dear {user} {what}"\n')
    (tmp_path / "digest.txt.j2").write_text("{{ greeting }}\n{{ t.footer }}\n")
    policy = MailPolicy(templates=str(tmp_path))
    assert mail(policy=policy).text.startswith("Dear alice {what}\nSent by")
    (tmp_path / "digest.txt.j2").write_text("ok\n{{ greeting")
    with pytest.raises(InputError, match=r"^digest\.txt\.j2:2: "):
        mail(policy=policy)
    (tmp_path / "texts.en.toml").write_text("hello = ")
    with pytest.raises(InputError, match=r"texts\.en\.toml:1: not TOML"):
        mail(policy=policy)


def hostile(text: str) -> Action:
    return action(
        subject=job(name=text, id="7"), user="alice", partition=text, nodes=(text,), gpus=(gpu(node=text),),
        evidence=(evidence("memory", text=text), evidence("power", met=False, unknown=True, text=text)),
    )  # fmt: skip


def test_hostile_names_are_escaped() -> None:
    """They add no element, header, line or control character."""
    plain, bad = mail(hostile("x")), mail(hostile(HOSTILE))
    assert Tags(bad.html).seen == Tags(plain.html).seen
    assert "{{ 7*7 }}" in bad.html
    assert "{{ 7*7 }}" in bad.text
    assert len(bad.text.splitlines()) == len(plain.text.splitlines())
    assert "\x1b" not in bad.text + bad.html
    sent = message(bad, MailPolicy(), NOW)
    assert "Bcc" not in sent
    assert sent.keys() == message(plain, MailPolicy(), NOW).keys()


@given(st.text(min_size=1, max_size=60))
def test_name_cannot_inject_elements_or_headers(name: str) -> None:
    plain, bad = mail(hostile("x")), mail(hostile(name))
    assert Tags(bad.html).seen == Tags(plain.html).seen
    assert message(replace(bad, subject=name), MailPolicy(), NOW).as_bytes()


@pytest.mark.parametrize("recipient", ["alice@example.org\r\nBcc: x@y", "a b@example.org", "a@b@c", ""])
def test_invalid_address_is_rejected(recipient: str) -> None:
    with pytest.raises(InputError, match="not a mail address"):
        message(replace(mail(), recipient=recipient), MailPolicy(), NOW)


def test_address_comes_from_pattern_or_override() -> None:
    policy = MailPolicy(address="{user}@example.org", addresses={"bob": "robert@example.net"})
    assert address_of("alice", policy) == "alice@example.org"
    assert address_of("bob", policy) == "robert@example.net"


def test_phrases_of_findings_are_translated(tmp_path: Path) -> None:
    """Every phrase of the sources has a translation; a site can add phrases; unknown phrases are kept as they are."""
    source = Path(mail_module.__file__).parents[1]
    files = ("core/finding_texts.toml", "core/signature_texts.toml", "analysis/squatters.py", "zombies/orphans.py")
    german = mail_module.Texts("de", None)
    for phrase, translation in (
        ("96 % of the GPU memory held (76.8 of 80.0 GiB)", "96 % des GPU-Speichers belegt (76.8 von 80.0 GiB)"),
        ("no signal above 0 % (3 signals: util_pct, a, b)", "kein Signal \u00fcber 0 % (3 Signale: util_pct, a, b)"),
        ("ran 3h 23m of 2d: 7%", "lief 3h 23m von 2d: 7 %"),
        ("process 7 (a {gpus} b) is on GPU 0, 1", "Prozess 7 (a {gpus} b) ist auf GPU 0, 1"),
        (
            "the job ended FAILED; its time limit is not known",
            "der Job endete mit FAILED; sein Zeitlimit ist nicht bekannt",
        ),
        (
            "the server of vllm m at 127.0.0.1:8000 has ended (PID 41), and nothing listens there",
            "der Server von vllm m at 127.0.0.1:8000 ist beendet (PID 41), und niemand nimmt dort Verbindungen an",
        ),
        ("an unknown phrase", "an unknown phrase"),
    ):
        assert german.phrase(phrase) == translation
    assert mail_module.Texts("en", None).phrase("for 2h") == "for 2h"
    (tmp_path / "texts.de.toml").write_text('[phrases]\n"for {span}" = "{span} lang"\n')
    assert mail_module.Texts("de", tmp_path).phrase("for 2h") == "2h lang"
    # Phrases of the catalog that the sources no longer contain are useless.
    text = " ".join((source / name).read_text() for name in files)
    text += "".join((TEXTS.parent / name).read_text() for name in ("signatures.toml", "actions.toml"))
    for phrase in tomllib.loads((TEXTS / "texts.de.toml").read_text())["phrases"]:
        words = re.findall(r"[A-Za-z-]{4,}", re.sub(r"\{\w+\}", " ", phrase))
        assert [word for word in words if word not in text] == [], phrase


@pytest.mark.parametrize("language", ["en", "de"])
def test_subject_of_single_finding_names_it(language: str) -> None:
    """Only idle GPUs are called idle; a single finding is in the singular."""
    policy = MailPolicy(language=language)
    shape = action(0, kind="time-limit", subject=job(name="train"))
    period = action(0, kind="low-efficiency-user")
    left = replace(action(0), finding=orphan())
    expected = {
        "en": ("Please check: Job 7 (train)", "Please check: Your jobs over the last days",
               "Please check: Process 4242 on n1", "A finding for administrators"),
        "de": ("Bitte prüfen: Job 7 (train)", "Bitte prüfen: Ihre Jobs der letzten Tage",
               "Bitte prüfen: Prozess 4242 auf n1", "Ein Befund für die Administration"),
    }[language]  # fmt: skip
    subjects = [mail(item, policy=policy).subject for item in (shape, period, left)]
    subjects.append(mail(left, policy=policy, user=None).subject)
    assert subjects == [f"[alpha] {words}" for words in expected]


def test_counts_of_one_are_in_the_singular() -> None:
    """This applies to jobs that could have started and to warnings."""
    impact = QueueImpact(3, 1, 60.0, 60.0)
    stages = Stages(first_warning_s=3600.0, cancel_s=7200.0)
    done = action(0, "cancel", impact=impact)
    done = replace(done, settings=replace(SETTINGS, fixed=stages, sliding=stages))
    assert "1 job could have started on them" in mail(done).text
    assert "after a warning:" in mail(done).text
    german = mail(done, policy=MailPolicy(language="de")).text
    assert "1 Job hätte darauf beginnen können" in german
    assert "nach einer Warnung" in german


def test_job_with_ended_steps_is_not_called_canceled() -> None:
    """The allocation remains, and its owner can continue to use it."""
    ended = mail(replace(action(0, "cancel"), steps=True))
    assert ended.subject == "[alpha] Steps of job 7 were ended"
    assert "Steps ended" in ended.text
    assert "The allocation remains;" in ended.text
    assert "anceled" not in ended.subject + ended.text
    both = mail(replace(action(0, "cancel"), steps=True), action(0, "cancel"))
    assert both.subject == "[alpha] 2 of your jobs and GPUs need attention"


def test_warning_without_further_action_announces_none() -> None:
    """The job is exempt from everything but warnings."""
    assert "No action will be taken." in mail(replace(action(), stays=True)).text
    assert "canceled after" in mail(action()).text


def ended(number: int, kind: str = "time-limit", **values: object) -> Action:
    """A finding about a job that has ended."""
    subject = job(job_id=number, id=str(number), name="done", end=NOW - timedelta(hours=5))
    return action(0, subject=subject, kind=kind, **values)


def many(count: int) -> list[Action]:
    """Findings of all kinds: of jobs that run, with and without warnings, and that have ended."""
    kinds = sorted(KINDS)
    subjects = [job(job_id=n, id=str(n), name="j", end=NOW if n % 3 else None) for n in range(count)]
    return [
        action(int(n % 2 and kinds[n % len(kinds)] in IDLE_KINDS), kind=kinds[n % len(kinds)], subject=subject,
               gpus=tuple(gpu(i) for i in range(8)), evidence=(evidence("memory"),) * 9, held_gpu_hours=float(n))
        for n, subject in enumerate(subjects)
    ]  # fmt: skip


@pytest.mark.parametrize("count", [2, 3, 5, 9, 30, 500])
@pytest.mark.parametrize("user", ["alice", None])
@pytest.mark.parametrize("language", ["en", "de"])
def test_text_has_at_most_40_lines(count: int, user: str | None, language: str) -> None:
    """It begins with a summary, and names the command that lists what is left out."""
    policy = MailPolicy(language=language, help_url="https://example.org/gpus")
    result = mail(*many(count), policy=policy, user=user)
    assert len(result.text.splitlines()) <= 40
    if count > 5:
        assert f"slurm-affinode zombies list --{'user alice' if user else 'cluster alpha'}" in result.text
    assert result.html.count("<li") <= 60


def test_hundreds_of_gpus_and_lines_of_evidence_are_cut() -> None:
    """Of one finding as of many."""
    result = mail(action(gpus=tuple(gpu(i) for i in range(64)), evidence=(evidence("memory"),) * 90))
    assert len(result.text.splitlines()) <= 40
    assert "and 60 further GPUs" in result.text


def test_ended_jobs_are_not_described_as_held() -> None:
    """They hold nothing, and their owner can do nothing about them now."""
    for result in (mail(ended(8)), mail(ended(8), ended(9, "idle-allocation"))):
        assert "have ended" in result.text
        assert not re.search(r"hold them|are allocated|scancel|keep ", result.text)
    assert "GPUs were allocated and not used." in mail(ended(9, "idle-allocation")).text
    assert "slurm-affinode job 8" in mail(ended(8)).text


def test_summary_separates_running_and_ended_jobs() -> None:
    """The most urgent finding is the first with evidence; the counts are those of the actions."""
    result = mail(*(ended(n) for n in range(20, 26)), action(0, kind="fragmentation"), action(held_gpu_hours=2.0))
    summary, _, rest = result.text.partition("Job 7 (")
    assert "Running jobs with idle GPUs: 1 (GPUs: 1; GPU-hours without use: 2.0)" in summary
    assert "Canceled or suspended if they stay idle: 1, the first after 2026-11-18 13:00 UTC" in summary
    assert "Jobs that have ended: 6 (GPU-hours without use: 18.0)" in summary
    assert "Other findings: 1" in summary
    assert "Warning 1 of 2" in rest.splitlines()[0]
    assert "Has ended: The time limit was far above the time used. Job 20, Job 21" in rest
    assert "and 2 more; 18.0 GPU-hours" in rest


def test_unmeasured_hours_of_further_findings_are_not_zero() -> None:
    """An unknown number of GPU-hours is left out of their line, and unknown in the summary."""
    result = mail(*(ended(n, held_gpu_hours=None) for n in range(20, 28)))
    assert "Jobs that have ended: 8 (GPU-hours without use: unknown)" in result.text
    assert "0.0" not in result.text


def test_template_of_the_site_gets_all_findings(tmp_path: Path) -> None:
    """It may not know of the lines about further findings."""
    (tmp_path / "digest.txt.j2").write_text("{% for item in items %}{{ item.title }}\n{% endfor %}")
    result = mail(*(ended(n) for n in range(20, 60)), policy=MailPolicy(templates=str(tmp_path)))
    assert len(result.text.splitlines()) == 40


def test_announced_cancellations_come_first() -> None:
    """Each is shown with its time, the earliest first, before the evidence of any."""
    late, soon = action(1), action(2, subject=job(job_id=9, id="9", name="b"))
    text = mail(*(ended(n, sorted(KINDS)[n - 20]) for n in range(20, 32)), late, soon).text
    assert text.index("Job 9 (b): Last warning") < text.index("Job 7 (train): Warning 1 of 2")
    assert text.count("it will be canceled after") == 2
