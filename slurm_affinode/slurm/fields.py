"""The columns of sacct: every name that a release has printed, and which hold free text.

From ``sacct --helpformat`` of Slurm 20.02 to 26.05 and the manual page of 14.11 for the older names.
"""

from __future__ import annotations

_NAMES = """
Account AdminComment AllocCPUS AllocGRES AllocNodes AllocTRES AssocID AveCPU AveCPUFreq AveDiskRead AveDiskWrite
AvePages AveRSS AveVMSize BlockID Cluster Comment ConsumedEnergy ConsumedEnergyRaw Constraints Container CPUTime
CPUTimeRAW DBIndex DerivedExitCode Elapsed ElapsedRaw Eligible End ExitCode Extra FailedNode Flags GID Group HetJobID
HetJobOffset JobID JobIDRaw JobName Layout Licenses MaxDiskRead MaxDiskReadNode MaxDiskReadTask MaxDiskWrite
MaxDiskWriteNode MaxDiskWriteTask MaxPages MaxPagesNode MaxPagesTask MaxRSS MaxRSSNode MaxRSSTask MaxVMSize
MaxVMSizeNode MaxVMSizeTask McsLabel MinCPU MinCPUNode MinCPUTask NCPUS NNodes NodeList NTasks PackJobID PackJobOffset
Partition Planned PlannedCPU PlannedCPURAW Priority QOS QOSRAW QOSREQ Reason ReqCPUFreq ReqCPUFreqGov ReqCPUFreqMax
ReqCPUFreqMin ReqCPUS ReqGRES ReqMem ReqNodes ReqReservation ReqTRES Reservation ReservationId Reserved ResvCPU
ResvCPURAW Restarts SegmentSize SLUID Start State StdErr StdIn StdOut Submit SubmitLine Suspended SystemComment
SystemCPU Timelimit TimelimitRaw TotalCPU TRESUsageInAve TRESUsageInMax TRESUsageInMaxNode TRESUsageInMaxTask
TRESUsageInMin TRESUsageInMinNode TRESUsageInMinTask TRESUsageInTot TRESUsageOutAve TRESUsageOutMax
TRESUsageOutMaxNode TRESUsageOutMaxTask TRESUsageOutMin TRESUsageOutMinNode TRESUsageOutMinTask TRESUsageOutTot
UID User UserCPU WCKey WCKeyID WorkDir JobComment Associd Reqmem UsedGRES QOSLevel AllocGres Uid ReqGres
"""

KNOWN = {name.lower(): name for name in reversed(_NAMES.split())}
"""Lower-case name -> the name as sacct writes it (headers are compared without regard to case)."""

FREE_TEXT = frozenset(
    {
        "jobname", "submitline", "comment", "admincomment", "systemcomment", "extra", "workdir", "stdin", "stdout",
        "stderr", "constraints", "container", "jobcomment", "reason", "reservation", "wckey", "licenses",
    }
)  # fmt: skip
"""Columns whose text a person chose, so that it may hold the delimiter or a newline."""

WANTED = (
    "JobIDRaw", "JobID", "Cluster", "User", "UID", "Account", "Partition", "QOS", "State", "ExitCode", "Reason",
    "Submit", "Eligible", "Start", "End", "ElapsedRaw", "Suspended", "TimelimitRaw", "NNodes", "NodeList",
    "AllocCPUS", "ReqCPUS", "NTasks", "ReqMem", "ReqTRES", "AllocTRES", "AllocGRES", "ReqGRES", "TotalCPU", "MaxRSS",
    "TRESUsageInMax", "ConsumedEnergyRaw", "Constraints", "AdminComment", "Comment", "WorkDir", "JobName",
    "SubmitLine",
)  # fmt: skip
"""The columns to ask sacct for, in the order in which to ask: free text last, JobName and SubmitLine at the end."""

USED = frozenset(name.lower() for name in WANTED) | {
    "elapsed", "timelimit", "allocnodes", "reqnodes", "ncpus", "usercpu", "systemcpu", "consumedenergy",
}  # fmt: skip
"""Every column that is read, in lower case: ``WANTED`` and what stands in for some of them."""
