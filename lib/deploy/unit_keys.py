"""The keys that systemd knows in [Unit], [Service] and [Install], so that a misspelt or misplaced one is found.

Source: `systemd --dump-configuration-items` of systemd 252 (Debian 12); the newer ones from systemd.unit(5),
systemd.service(5), systemd.exec(5) and systemd.resource-control(5), which say "Added in version N" for each.
"""

from __future__ import annotations

_UNIT = """
    Description Documentation SourcePath Requires Requisite Wants BindsTo BindTo Upholds Conflicts Before After
    OnSuccess OnFailure PropagatesReloadTo PropagateReloadTo ReloadPropagatedFrom PropagateReloadFrom
    PropagatesStopTo StopPropagatedFrom PartOf JoinsNamespaceOf RequiresOverridable RequisiteOverridable
    RequiresMountsFor StopWhenUnneeded RefuseManualStart RefuseManualStop AllowIsolate DefaultDependencies
    OnSuccessJobMode OnFailureJobMode OnFailureIsolate IgnoreOnIsolate JobTimeoutSec JobRunningTimeoutSec
    JobTimeoutAction JobTimeoutRebootArgument StartLimitIntervalSec StartLimitInterval StartLimitBurst
    StartLimitAction FailureAction SuccessAction FailureActionExitStatus SuccessActionExitStatus RebootArgument
    ConditionPathExists ConditionPathExistsGlob ConditionPathIsDirectory ConditionPathIsSymbolicLink
    ConditionPathIsMountPoint ConditionPathIsReadWrite ConditionPathIsEncrypted ConditionDirectoryNotEmpty
    ConditionFileNotEmpty ConditionFileIsExecutable ConditionNeedsUpdate ConditionFirstBoot ConditionArchitecture
    ConditionFirmware ConditionVirtualization ConditionHost ConditionKernelCommandLine ConditionKernelVersion
    ConditionCredential ConditionSecurity ConditionCapability ConditionACPower ConditionMemory ConditionCPUFeature
    ConditionCPUs ConditionEnvironment ConditionUser ConditionGroup ConditionControlGroupController
    ConditionOSRelease ConditionMemoryPressure ConditionCPUPressure ConditionIOPressure AssertPathExists
    AssertPathExistsGlob AssertPathIsDirectory AssertPathIsSymbolicLink AssertPathIsMountPoint AssertPathIsReadWrite
    AssertPathIsEncrypted AssertDirectoryNotEmpty AssertFileNotEmpty AssertFileIsExecutable AssertNeedsUpdate
    AssertFirstBoot AssertArchitecture AssertVirtualization AssertHost AssertKernelCommandLine AssertKernelVersion
    AssertCredential AssertSecurity AssertCapability AssertACPower AssertMemory AssertCPUFeature AssertCPUs
    AssertEnvironment AssertUser AssertGroup AssertControlGroupController AssertOSRelease AssertMemoryPressure
    AssertCPUPressure AssertIOPressure CollectMode
"""

_SERVICE = """
    PIDFile ExecCondition ExecStartPre ExecStart ExecStartPost ExecReload ExecStop ExecStopPost RestartSec
    TimeoutSec TimeoutStartSec TimeoutStopSec TimeoutAbortSec TimeoutStartFailureMode TimeoutStopFailureMode
    RuntimeMaxSec RuntimeRandomizedExtraSec WatchdogSec StartLimitInterval StartLimitBurst StartLimitAction
    FailureAction RebootArgument Type ExitType Restart PermissionsStartOnly RootDirectoryStartOnly RemainAfterExit
    GuessMainPID RestartPreventExitStatus RestartForceExitStatus SuccessExitStatus NonBlocking BusName
    FileDescriptorStoreMax NotifyAccess Sockets USBFunctionDescriptors USBFunctionStrings OOMPolicy WorkingDirectory
    RootDirectory RootImage RootImageOptions RootHash RootHashSignature RootVerity ExtensionDirectories
    ExtensionImages MountImages User Group SupplementaryGroups Nice OOMScoreAdjust CoredumpFilter IOSchedulingClass
    IOSchedulingPriority CPUSchedulingPolicy CPUSchedulingPriority CPUSchedulingResetOnFork CPUAffinity NUMAPolicy
    NUMAMask UMask Environment EnvironmentFile PassEnvironment UnsetEnvironment DynamicUser RemoveIPC StandardInput
    StandardOutput StandardError StandardInputText StandardInputData TTYPath TTYReset TTYVHangup TTYVTDisallocate
    TTYRows TTYColumns SyslogIdentifier SyslogFacility SyslogLevel SyslogLevelPrefix LogLevelMax
    LogRateLimitIntervalSec LogRateLimitBurst LogExtraFields SecureBits CapabilityBoundingSet AmbientCapabilities
    TimerSlackNSec NoNewPrivileges KeyringMode ProtectProc ProcSubset SystemCallFilter SystemCallArchitectures
    SystemCallErrorNumber SystemCallLog MemoryDenyWriteExecute RestrictNamespaces RestrictRealtime RestrictSUIDSGID
    RestrictAddressFamilies LockPersonality RestrictFileSystems LimitCPU LimitFSIZE LimitDATA LimitSTACK LimitCORE
    LimitRSS LimitNOFILE LimitAS LimitNPROC LimitMEMLOCK LimitLOCKS LimitSIGPENDING LimitMSGQUEUE LimitNICE
    LimitRTPRIO LimitRTTIME ReadWriteDirectories ReadOnlyDirectories InaccessibleDirectories ReadWritePaths
    ReadOnlyPaths InaccessiblePaths ExecPaths NoExecPaths ExecSearchPath BindPaths BindReadOnlyPaths
    TemporaryFileSystem PrivateTmp PrivateDevices ProtectKernelTunables ProtectKernelModules ProtectKernelLogs
    ProtectClock ProtectControlGroups NetworkNamespacePath IPCNamespacePath LogNamespace PrivateNetwork PrivateUsers
    PrivateMounts PrivateIPC ProtectSystem ProtectHome MountFlags MountAPIVFS Personality RuntimeDirectoryPreserve
    RuntimeDirectoryMode RuntimeDirectory StateDirectoryMode StateDirectory CacheDirectoryMode CacheDirectory
    LogsDirectoryMode LogsDirectory ConfigurationDirectoryMode ConfigurationDirectory SetCredential
    SetCredentialEncrypted LoadCredential LoadCredentialEncrypted TimeoutCleanSec PAMName IgnoreSIGPIPE
    UtmpIdentifier UtmpMode SELinuxContext AppArmorProfile SmackProcessLabel ProtectHostname Slice AllowedCPUs
    StartupAllowedCPUs AllowedMemoryNodes StartupAllowedMemoryNodes CPUAccounting CPUWeight StartupCPUWeight
    CPUShares StartupCPUShares CPUQuota CPUQuotaPeriodSec MemoryAccounting MemoryMin DefaultMemoryMin
    DefaultMemoryLow MemoryLow MemoryHigh MemoryMax MemorySwapMax MemoryLimit DeviceAllow DevicePolicy IOAccounting
    IOWeight StartupIOWeight IODeviceWeight IOReadBandwidthMax IOWriteBandwidthMax IOReadIOPSMax IOWriteIOPSMax
    IODeviceLatencyTargetSec BlockIOAccounting BlockIOWeight StartupBlockIOWeight BlockIODeviceWeight
    BlockIOReadBandwidth BlockIOWriteBandwidth TasksAccounting TasksMax Delegate DisableControllers IPAccounting
    IPAddressAllow IPAddressDeny IPIngressFilterPath IPEgressFilterPath ManagedOOMSwap ManagedOOMMemoryPressure
    ManagedOOMMemoryPressureLimit ManagedOOMPreference BPFProgram SocketBindAllow SocketBindDeny
    RestrictNetworkInterfaces SendSIGKILL SendSIGHUP KillMode KillSignal RestartKillSignal FinalKillSignal
    WatchdogSignal
"""

_INSTALL = """
    Alias WantedBy RequiredBy Also DefaultInstance
"""

#: Section -> the keys that systemd 252 knows in it.
SECTION_KEYS: dict[str, frozenset[str]] = {
    "Unit": frozenset(_UNIT.split()),
    "Service": frozenset(_SERVICE.split()),
    "Install": frozenset(_INSTALL.split()),
}

#: Sections of other unit types; their keys are not judged here.
OTHER_SECTIONS = frozenset(["Automount", "Mount", "Path", "Scope", "Slice", "Socket", "Swap", "Timer"])

_BOOLEAN = """
    AllowIsolate BlockIOAccounting CPUAccounting CPUSchedulingResetOnFork DefaultDependencies DynamicUser
    GuessMainPID IOAccounting IPAccounting IgnoreOnIsolate IgnoreSIGPIPE LockPersonality MemoryAccounting
    MemoryDenyWriteExecute NoNewPrivileges NonBlocking OnFailureIsolate PermissionsStartOnly PrivateDevices
    PrivateIPC PrivateMounts PrivateNetwork PrivateTmp PrivateUsers ProtectClock ProtectControlGroups
    ProtectHostname ProtectKernelLogs ProtectKernelModules ProtectKernelTunables RefuseManualStart RefuseManualStop
    RemainAfterExit RemoveIPC RestrictRealtime RestrictSUIDSGID RootDirectoryStartOnly SendSIGHUP SendSIGKILL
    StopWhenUnneeded SyslogLevelPrefix TTYReset TTYVHangup TTYVTDisallocate TasksAccounting
    """
#: Keys whose value is yes or no.
BOOLEAN_KEYS = frozenset(_BOOLEAN.split())

_TIME = """
    JobRunningTimeoutSec JobTimeoutSec LogRateLimitIntervalSec RestartSec RuntimeMaxSec RuntimeRandomizedExtraSec
    StartLimitInterval StartLimitIntervalSec TimeoutAbortSec TimeoutCleanSec TimeoutSec TimeoutStartSec
    TimeoutStopSec WatchdogSec
    """
#: Keys whose value is a time span.
TIME_KEYS = frozenset(_TIME.split())

#: Keys that came after 252: key -> the version that brought it.
NEWER_KEYS: dict[str, int] = {
    "LogFilterPatterns": 253,
    "OpenFile": 253,
    "MemoryZSwapMax": 253,
    "StartupMemoryHigh": 253,
    "StartupMemoryMax": 253,
    "StartupMemoryLow": 253,
    "RestartSteps": 254,
    "RestartMaxDelaySec": 254,
    "RestartMode": 254,
    "DelegateSubgroup": 254,
    "FileDescriptorStorePreserve": 254,
    "ImportCredential": 254,
    "RootEphemeral": 254,
    "MemoryPressureWatch": 254,
    "MemoryPressureThresholdSec": 254,
    "MemoryKSM": 254,
    "CoredumpReceive": 255,
    "SurviveFinalKillSignal": 255,
    "RootImagePolicy": 254,
    "MountImagePolicy": 254,
    "ExtensionImagePolicy": 254,
    "NFTSet": 255,
    "ConditionVersion": 258,
    "AssertVersion": 258,
    "PrivatePIDs": 257,
    "BindLogSockets": 257,
    "ManagedOOMMemoryPressureDurationSec": 257,
    "StateDirectoryQuota": 258,
    "CacheDirectoryQuota": 258,
    "LogsDirectoryQuota": 258,
    "PrivateBPF": 258,
    "DelegateNamespaces": 258,
    "RefreshOnReload": 258,
    "MemoryZSwapWriteback": 256,
    "WantsMountsFor": 256,
}
