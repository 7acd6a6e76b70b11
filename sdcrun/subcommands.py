"""The sub-commands of sdcrun: thin typer functions around the rooms that do the work."""

from __future__ import annotations

import typer

from sdcrun.errors import UsageError

app = typer.Typer(add_completion=False, no_args_is_help=True, rich_markup_mode=None, pretty_exceptions_enable=False)
_DIR = typer.Option(None, "--sdc-dir", "--sdc_dir", envvar="SDCRUN_DIR", help="folder of job folders")


def run(tokens: list[str]) -> int:
    """Run the sub-command that `tokens` begins with; returns its exit code. Raises UsageError with one line."""
    try:
        code = app(args=tokens, prog_name="sdcrun", standalone_mode=False)
    except Exception as error:
        # Usage errors of the command-line library, whichever one this typer is built on.
        if not hasattr(error, "format_message"):
            raise
        raise UsageError(f"{error.format_message().rstrip('.')} (sdcrun {tokens[0]} --help)") from None
    return code if isinstance(code, int) else 0


def options(name: str) -> list[str]:
    """The long options of a sub-command, for completion."""
    command = typer.main.get_command(app).commands[name]
    names = [text for parameter in command.params for text in parameter.opts if text.startswith("--")]
    return sorted({text for text in names if "_" not in text} | {"--help"})


@app.command()
def report(
    job: str = typer.Argument(None, help="id or folder of a job; the newest when left out"),
    format: str = typer.Option("text", "--format", help="text, json, html, junit or prometheus"),
    output: str = typer.Option(None, "-o", "--output", help="file to write to"),
    commands: str = typer.Option(None, "--commands", help="lines to take a device out: slurm, kubernetes, ..."),
    directory: str = _DIR,
) -> None:
    """What was found in a job. Exit code 0: clean, 1: an unexplained finding, 2: error."""
    from sdcrun.report import command

    raise typer.Exit(command.report(job, format, output, directory, commands))


@app.command(context_settings={"ignore_unknown_options": False})
def campaign(
    file: str = typer.Argument(..., help="matrix of faults, as configs/campaign.yaml"),
    command: list[str] = typer.Argument(..., metavar="-- [TORCHRUN OPTIONS] SCRIPT [ARGUMENTS]", help="the job"),
    job: str = typer.Option(None, "--sdc-job", "--sdc_job", help="name of the campaign's folder"),
    directory: str = _DIR,
    fresh: bool = typer.Option(False, "--fresh", help="start over; what is on record is moved aside"),
) -> None:
    """A matrix of faults on your own job -> a coverage table. The same command again goes on where it stopped.

    Exit code 0: every fault that can be caught was, 88: some was missed, 2: error, 130: interrupted.
    """
    import sys
    from pathlib import Path

    from sdcrun import campaignfile
    from sdcrun.config import DEFAULT_DIR, absolute
    from sdcrun.progress import Bar
    from sdcrun.report.render import coverage_text
    from sdcrun.runner.campaigns import command as campaigns
    from sdcrun.runner.campaigns.conduct import CampaignError

    folder = Path(absolute(directory or DEFAULT_DIR)) / (job or campaigns.name_of(file))
    try:
        with Bar(len(campaignfile.read(file).cells)) as bar:
            code = campaigns.run(file, command, folder, fresh, bar)
    except CampaignError as error:
        raise UsageError(str(error)) from None
    coverage_text.show(campaigns.load(folder), sys.stdout)
    raise typer.Exit(code)


@app.command()
def jobs(directory: str = _DIR) -> None:
    """All jobs, the newest first."""
    from sdcrun.report import command

    raise typer.Exit(command.jobs(directory))


@app.command()
def watch(
    job: str = typer.Argument(None, help="id or folder of a job; the newest when left out"),
    directory: str = _DIR,
) -> None:
    """Follow a job until it ends: findings as they come, and one live line. Exit code as that of report."""
    from sdcrun.report.watch import watch as follow

    raise typer.Exit(follow(job, directory))


@app.command()
def doctor(
    script: list[str] = typer.Argument(
        None, metavar="[-- [TORCHRUN OPTIONS] SCRIPT [ARGUMENTS]]", help="a script to try on two ranks"
    ),
    seconds: float = typer.Option(60.0, "--seconds", min=5.0, help="how long to try the script"),
    directory: str = _DIR,
) -> None:
    """Can this machine, and a script, be guarded, and how far. Exit code 0: yes, 1: not fully, 2: no."""
    from sdcrun.doctorview import show

    raise typer.Exit(show(directory, script or [], seconds))


@app.command()
def checkpoints(
    job: str = typer.Argument(None, help="id or folder of a job; the newest when left out"),
    format: str = typer.Option("text", "--format", help="text or json"),
    directory: str = _DIR,
) -> None:
    """The checkpoints of a job, in the state they are in now, and the newest safe one."""
    from sdcrun.report import checkpoints as view

    raise typer.Exit(view.show(job, directory, format))


@app.command()
def verify(
    files: list[str] = typer.Argument(..., help="checkpoint files, or folders of torch.distributed.checkpoint"),
) -> None:
    """Is each file still what was saved? Exit code 0: yes, and the ranks agreed on it, 1: no, 2: cannot tell."""
    import subprocess
    import sys

    from sdcrun.report.checkpoints import refresh_files

    refresh_files(files)
    # A process of its own: it needs torch, which no sub-command imports.
    raise typer.Exit(subprocess.call([sys.executable, "-m", "sdcrun.shim.checkpoints.verify", *files]))


@app.command()
def approve(
    job: str = typer.Argument(..., help="id or folder of a job"),
    device: str = typer.Argument(..., help="HOST/UUID or UUID of a suspect, or 'rank N'"),
    by: str = typer.Option(..., "--by", help="who decides"),
    directory: str = _DIR,
) -> None:
    """Put on record that a person has approved taking a suspect out of service. Nothing is executed."""
    from sdcrun.report.approve import approve as record

    raise typer.Exit(record(job, device, by, directory))
