#!/usr/bin/env bash
# Runs the tests on Pythons that this machine does not have: a clone of the last commit in a root of its own, made of the
# packages of the release that has that Python, as a newcomer's machine is. Wants root and debootstrap, 10 GB and half an
# hour for each; roots stay in $ROOTS (/var/tmp/kvstore-pythons) for the next time. $1: make's target; then the versions.
# For 3.12 debootstrap needs Ubuntu's keyring (package ubuntu-keyring), or DEBOOTSTRAP=--no-check-gpg.
set -euo pipefail
cd "$(dirname "$0")/.."

target=$1
shift
roots=${ROOTS:-/var/tmp/kvstore-pythons}
certificates=/etc/ssl/certs/ca-certificates.crt
environment=(PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/srv LANG=C.UTF-8
    {PIP_CERT,SSL_CERT_FILE,REQUESTS_CA_BUNDLE}=$certificates)

# Of each version: the release, its mirror, the script of debootstrap's that knows it under whatever name.
release_of() {
    case "$1" in
        3.12) echo noble http://archive.ubuntu.com/ubuntu gutsy --components=main,universe ;;
        3.13) echo trixie http://deb.debian.org/debian sid ;;
        3.14) echo forky http://deb.debian.org/debian sid ;;
        *) echo "expected 3.12, 3.13 or 3.14, got $1" >&2 && return 1 ;;
    esac
}

make_root() { # its folder, release, mirror, script, options
    local root=$1 release=$2 mirror=$3 script=$4
    shift 4
    # shellcheck disable=SC2086 # several options in one variable
    debootstrap --variant=minbase --include=python3,python3-venv,make,ca-certificates,git "$@" ${DEBOOTSTRAP:-} \
        "$release" "$root.part" "$mirror" "/usr/share/debootstrap/scripts/$script" >"$root.log"
    mv "$root.part" "$root"
}

mkdir -p "$roots"
failed=
for version in "$@"; do
    known=$(release_of "$version")
    read -r release mirror script options <<<"$known"
    root=$roots/$release
    # shellcheck disable=SC2086 # none or some
    [ -d "$root" ] || make_root "$root" "$release" "$mirror" "$script" $options
    # Whoever reaches PyPI by a certificate of his own does so there, too.
    [ -f $certificates ] && cp $certificates "$root$certificates"
    cp /etc/resolv.conf /etc/hosts "$root/etc/"
    rm -rf "$root/srv/kvstore" "$root/tmp/"* && git clone --quiet . "$root/srv/kvstore"
    echo "Python $version on $release: make $target"
    # Mounts and processes end with the namespaces; bash stays as their init, which waits for what nobody else waits for.
    unshare --mount --pid --fork bash -euc "
        mount --rbind /dev $root/dev && mount -t proc proc $root/proc && mount -t sysfs sys $root/sys
        chroot $root env -i ${environment[*]} make -C /srv/kvstore $target || exit 1" || failed="$failed $version"
done
[ -z "$failed" ] || { echo "failed on Python$failed" >&2 && exit 1; }
