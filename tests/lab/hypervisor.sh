#!/bin/bash
# Runs inside a mount and cgroup namespace of its own: makes the containers' roots, starts them, and becomes the hypervisor's sshd.
#   hypervisor.sh FOLDER BRIDGE SUBNET PROJECT ID...     (see lab.py, which calls it)
set -euo pipefail
folder=$1 bridge=$2 subnet=$3 project=$4
shift 4
# systemd in a container wants one cgroup2 tree and nothing else
umount -R /sys/fs/cgroup 2>/dev/null || umount -l /sys/fs/cgroup
mount -t cgroup2 cgroup2 /sys/fs/cgroup
mkdir -p /sys/fs/cgroup/hypervisor
echo $$ >/sys/fs/cgroup/hypervisor/cgroup.procs
mkdir -p /run/sshd "$folder/ct" "$folder/lxc"
# a login script of this machine's root (pyenv, conda) is none of the lab's and costs each command half a second
for file in .bashrc .profile .bash_profile; do
    if [[ -f /root/$file ]]; then mount --bind /dev/null "/root/$file"; fi
done
mount -t tmpfs -o size=6g,mode=755 tmpfs "$folder/ct"
for id in "$@"; do
    place=$folder/ct/$id
    root=$place/root
    mkdir -p "$place"/{upper,work,root} "$folder/lxc/$id"
    # the machine's own files below, a layer in memory above: Python and the project are there at once
    mount -t overlay overlay -o lowerdir=/,upperdir="$place/upper",workdir="$place/work" "$root"
    echo "ct$id" >"$root/etc/hostname"
    printf '127.0.0.1 localhost ct%s\n' "$id" >"$root/etc/hosts"
    : >"$root/etc/machine-id"
    install -m 600 "$folder/hostkey-$id" "$root/etc/ssh/lab_hostkey"
    rm -f "$root"/root/{.bashrc,.profile,.bash_profile}
    rm -rf "$root"/etc/ssh/sshd_config.d/* "$root"/var/log/journal "$root"/etc/sudoers.d/*
    mkdir -p "$root/etc/ssh/sshd_config.d" "$root/etc/sudoers.d" "$root/var/log/journal"
    printf '%s\n' 'HostKey /etc/ssh/lab_hostkey' 'PermitRootLogin prohibit-password' 'PasswordAuthentication no' \
        'UseDNS no' 'MaxSessions 64' 'MaxStartups 100' 'AuthorizedKeysFile /etc/ssh/lab_keys' 'StrictModes no' \
        >"$root/etc/ssh/sshd_config.d/10-lab.conf"
    cp "$folder/id.pub" "$root/etc/ssh/lab_keys"
    chmod 644 "$root/etc/ssh/lab_keys"
    # ops may use `sudo -n`, plain may not
    printf 'ops:x:2001:2001::/home/ops:/bin/bash\nplain:x:2002:2002::/home/plain:/bin/sh\n' >>"$root/etc/passwd"
    printf 'ops:x:2001:\nplain:x:2002:\n' >>"$root/etc/group"
    printf 'ops:*:20000:0:99999:7:::\nplain:*:20000:0:99999:7:::\n' >>"$root/etc/shadow"
    install -d -o 2001 -g 2001 "$root/home/ops"
    install -d -o 2002 -g 2002 "$root/home/plain"
    printf 'ops ALL=(ALL) NOPASSWD: ALL\n' >"$root/etc/sudoers.d/ops"
    chmod 440 "$root/etc/sudoers.d/ops"
    # only what a server's host needs, not the other units that this machine has enabled
    printf '%s\n' '[Unit]' 'Requires=basic.target' 'After=basic.target' 'AllowIsolate=yes' \
        'Wants=dbus.service ssh.service systemd-user-sessions.service systemd-logind.service multi-user.target' \
        >"$root/etc/systemd/system/lab.target"
    rm -rf "$root"/etc/systemd/system/*.wants
    ln -sf /etc/systemd/system/lab.target "$root/etc/systemd/system/default.target"
    mkdir -p "$root/etc/systemd/system/multi-user.target.wants"
    ln -sf /lib/systemd/system/ssh.service "$root/etc/systemd/system/multi-user.target.wants/ssh.service"
    for unit in systemd-timesyncd.service systemd-pcrphase.service systemd-pcrphase-sysinit.service systemd-resolved.service \
        systemd-networkd.service systemd-udevd.service systemd-udev-trigger.service systemd-networkd-wait-online.service \
        networking.service apt-daily.timer apt-daily-upgrade.timer fstrim.timer man-db.timer dpkg-db-backup.timer \
        e2scrub_all.timer lxc.service lxc-net.service lxc-monitord.service; do
        ln -sf /dev/null "$root/etc/systemd/system/$unit"
    done
    cat >"$folder/lxc/$id/config" <<C
lxc.uts.name = ct$id
lxc.rootfs.path = dir:$root
lxc.net.0.type = veth
lxc.net.0.link = $bridge
lxc.net.0.flags = up
lxc.net.0.veth.pair = ${bridge}v$id
lxc.net.0.ipv4.address = $subnet.$id/24
lxc.net.0.ipv4.gateway = $subnet.1
lxc.mount.auto = proc:mixed sys:mixed cgroup:mixed
lxc.apparmor.profile = unconfined
lxc.cap.drop = sys_module sys_time mac_admin mac_override
lxc.tty.max = 0
lxc.pty.max = 64
lxc.cgroup.relative = 1
lxc.mount.entry = tmpfs tmp tmpfs rw,nosuid,nodev 0 0
lxc.mount.entry = tmpfs var/tmp tmpfs rw,nosuid,nodev 0 0
lxc.init.cmd = /lib/systemd/systemd
C
    # the checkout and its caches, where they lie on another file system or below a folder that the container replaces
    while IFS= read -r path; do
        [[ -n $path ]] || continue
        mkdir -p "$root$path"
        options=bind,ro,create=dir
        echo "lxc.mount.entry = $path ${path#/} none $options 0 0" >>"$folder/lxc/$id/config"
    done <"$project"
    lxc-start -P "$folder/lxc" -n "$id" -o "$folder/lxc/$id/log"
done
# As on a real hypervisor a container is started by a service, not as a child of whoever asks for it.
mkfifo "$folder/start"
(
    exec 9<>"$folder/start"
    while read -r id <&9; do lxc-start -P "$folder/lxc" -n "$id" -o "$folder/lxc/$id/log"; done
) &
exec /usr/sbin/sshd -D -e -f "$folder/sshd_config"
