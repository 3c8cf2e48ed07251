"""Run a command beside a Slurm on this machine, and take the Slurm down, however the command ends.

    python tools/slurm_cluster.py [--accounting] COMMAND...

Needs root and Debian's packages slurm-wlm and munge; with --accounting also slurmdbd and mariadb-server: one line
names the missing programs. Two nodes, n1 and n2, are two slurmd on localhost. All files lie in a temporary folder,
which the command finds in RESIDUA_SLURM; inside it, `python tools/slurm_cluster.py stop|start DAEMON` stops and starts
a daemon.
"""

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

LISTENERS = ("slurmctld", "slurmdbd", "n1", "n2")
CONFIGURATION = """
ClusterName=residua
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[slurmctld]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=2,batch_sched_delay=1
MpiDefault=none
SwitchType=switch/none
ReturnToService=2
SlurmdTimeout=20
SlurmctldTimeout=10
KillWait=5
MaxArraySize=101
MaxJobCount=5000
JobRequeue=1
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[n1]} CPUs=4 RealMemory=4000
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[n2]} CPUs=4 RealMemory=4000
PartitionName=main Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP
PartitionName=down Nodes=n1,n2 Default=NO MaxTime=INFINITE State=DOWN
"""
ACCOUNTING = {
    False: "AccountingStorageType=accounting_storage/none\nJobAcctGatherType=jobacct_gather/none\n",
    True: "AccountingStorageType=accounting_storage/slurmdbd\nAccountingStorageHost=127.0.0.1\n"
    "AccountingStoragePass={folder}/munge.socket\nAccountingStoragePort={ports[slurmdbd]}\nJobAcctGatherType=jobacct_gather/linux\n",
}
DATABASE = """
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
DbdHost=localhost
DbdAddr=127.0.0.1
DbdPort={ports[slurmdbd]}
SlurmUser=root
LogFile={folder}/slurmdbd.log
PidFile={folder}/slurmdbd.pid
StorageType=accounting_storage/mysql
StorageLoc=slurm_acct_db
StorageUser=root
"""


def free_ports() -> dict[str, int]:
    """Return a port for each daemon that listens on one."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in LISTENERS]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return dict(zip(LISTENERS, ports))


def missing(accounting: bool) -> list[str]:
    """Return the programs that a cluster needs and this machine lacks."""
    needed = ["munged", "slurmctld", "slurmd", "sbatch", "squeue", "scancel", "scontrol"]
    needed += ["slurmdbd", "mariadbd", "mariadb-install-db", "my_print_defaults", "sacctmgr"] if accounting else []
    return [name for name in needed if shutil.which(name) is None]


def commands(folder: Path) -> dict[str, list[str]]:
    """Return the command of each daemon, which runs it in the foreground, in the order in which they start."""
    munge = [f"--{name}-file={folder}/munge.{name}" for name in ("key", "log", "pid", "seed")]
    base = folder / "database"
    database = ["--no-defaults", f"--datadir={base}", f"--socket={base}.socket", f"--pid-file={base}.pid"]
    database += ["--skip-networking", "--user=root", f"--log-error={base}.log", "--innodb-buffer-pool-size=64M"]
    return {
        "munged": ["munged", "--foreground", "--force", f"--socket={folder}/munge.socket", *munge],
        "mariadbd": ["mariadbd", *database],
        "slurmdbd": ["slurmdbd", "-D"],
        "slurmctld": ["slurmctld", "-D"],
        "n1": ["slurmd", "-D", "-N", "n1"],
        "n2": ["slurmd", "-D", "-N", "n2"],
    }


def start(folder: Path, daemon: str) -> None:
    """Start a daemon, and note its process in the folder."""
    with (folder / f"{daemon}.out").open("a") as out:
        process = subprocess.Popen(commands(folder)[daemon], stdout=out, stderr=out, start_new_session=True)
    (folder / f"{daemon}.process").write_text(str(process.pid))


def stop(folder: Path, daemon: str, number: int = signal.SIGTERM) -> None:
    """Stop a daemon and wait for its end. After ten seconds it is killed."""
    note = folder / f"{daemon}.process"
    if not note.exists():
        return
    pid = int(note.read_text())
    end = time.monotonic() + 10
    while running(pid):
        os.kill(pid, number if time.monotonic() < end else signal.SIGKILL)
        time.sleep(0.2)
    note.unlink()


def running(pid: int) -> bool:
    """Return whether a process runs, which a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_for(name: str, condition: Callable[[], bool], seconds: float = 30) -> None:
    """Wait for a condition. Raises RuntimeError after some time."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise RuntimeError(f"{name}: not after {seconds:.0f} seconds")
        time.sleep(0.3)


def answers(*command: str) -> bool:
    """Return whether a command succeeds."""
    return subprocess.run(command, capture_output=True).returncode == 0


def set_up(folder: Path, accounting: bool) -> None:
    """Write the configuration, and start the daemons until two nodes are idle."""
    host = socket.gethostname().partition(".")[0]
    facts: Mapping[str, object] = {"folder": folder, "host": host, "ports": free_ports()}
    (folder / "slurm.conf").write_text((CONFIGURATION + ACCOUNTING[accounting]).format_map(facts))
    (folder / "slurmdbd.conf").write_text(DATABASE.format_map(facts))
    (folder / "slurmdbd.conf").chmod(0o600)
    (folder / "munge.key").write_bytes(os.urandom(128))
    (folder / "munge.key").chmod(0o400)
    os.environ |= {"SLURM_CONF": f"{folder}/slurm.conf", "RESIDUA_SLURM": str(folder)}
    start(folder, "munged")
    wait_for("munge", (folder / "munge.socket").exists)
    if accounting:
        start_database(folder)
    for daemon in ("slurmctld", "n1", "n2"):
        start(folder, daemon)
    idle = ["sinfo", "--noheader", "--partition=main", "--format=%D %T"]
    wait_for("nodes", lambda: subprocess.run(idle, capture_output=True, text=True).stdout.strip() == "2 idle")


def start_database(folder: Path) -> None:
    """Start MariaDB in the folder and Slurm's daemon before it."""
    os.environ["MYSQL_UNIX_PORT"] = f"{folder}/database.socket"
    install = ["mariadb-install-db", "--no-defaults", f"--datadir={folder}/database", "--user=root"]
    subprocess.run([*install, "--auth-root-authentication-method=normal"], check=True, capture_output=True)
    start(folder, "mariadbd")
    wait_for("MariaDB", (folder / "database.socket").exists)
    start(folder, "slurmdbd")
    wait_for("slurmdbd", lambda: answers("sacctmgr", "-n", "list", "cluster"))
    subprocess.run(["sacctmgr", "-i", "add", "cluster", "residua"], capture_output=True)


def beside(command: list[str]) -> int:
    """Run the command, and return its exit status. The processes that it started end with it."""
    process = subprocess.Popen(command, start_new_session=True)
    try:
        return process.wait()
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def take_down(folder: Path) -> None:
    """End all jobs, then the daemons. No further signal stops that."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    if (folder / "slurmctld.process").exists():
        subprocess.run(["timeout", "10", "scancel", "--user=root"], capture_output=True)
        queue = ["timeout", "5", "squeue", "--noheader"]
        for _ in range(20):
            if not subprocess.run(queue, capture_output=True, text=True).stdout.strip():
                break
            time.sleep(0.5)
    for daemon in reversed(commands(folder)):
        stop(folder, daemon)


def main(arguments: list[str]) -> int:
    """Run the command beside a Slurm, and return its exit status."""
    if len(arguments) == 2 and arguments[0] in ("start", "stop"):
        {"start": start, "stop": stop}[arguments[0]](Path(os.environ["RESIDUA_SLURM"]), arguments[1])
        return 0
    accounting = arguments[0] == "--accounting"
    lacking = missing(accounting) or ([] if os.geteuid() == 0 else ["the rights of root"])
    if lacking:
        print(f"no Slurm {'with' if accounting else 'without'} accounting here: {', '.join(lacking)} missing")
        return 0 if accounting else 1
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: sys.exit(143))
    with tempfile.TemporaryDirectory(prefix="residua-slurm-", ignore_cleanup_errors=True) as name:
        folder = Path(name).resolve()
        for place in ("state", "spool-n1", "spool-n2"):
            (folder / place).mkdir()
        try:
            set_up(folder, accounting)
            return beside(arguments[accounting:])
        finally:
            take_down(folder)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
