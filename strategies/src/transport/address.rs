//! Which of its own addresses a rank uses.

use std::net::{IpAddr, SocketAddr, ToSocketAddrs};

use crate::error::Error;

/// The address that `host:port` means.
pub(crate) fn resolve(master: &str) -> Result<SocketAddr, Error> {
    let cannot = |problem: String| {
        Error::Setting(format!(
            "{master} is no address ({problem}); set MASTER_ADDR to a name or address of the machine \
             on which rank 0 runs, and MASTER_PORT to a port that is free there"
        ))
    };
    let mut found = master.to_socket_addrs().map_err(|error| cannot(error.to_string()))?;
    let address = found.next().ok_or_else(|| cannot("the name has none".to_owned()))?;
    let is_one_machine = match address.ip() {
        IpAddr::V4(ip) => !ip.is_unspecified() && !ip.is_multicast() && !ip.is_broadcast(),
        IpAddr::V6(ip) => !ip.is_unspecified() && !ip.is_multicast(),
    };
    if is_one_machine {
        Ok(address)
    } else {
        Err(cannot("it is not that of one machine".to_owned()))
    }
}

/// This machine's address on an interface, of the same family as `like`. An address stands for itself.
pub(crate) fn of_interface(interface: &str, like: IpAddr) -> Result<IpAddr, Error> {
    if let Ok(address) = interface.parse::<IpAddr>() {
        if address.is_ipv4() == like.is_ipv4() {
            return reachable(address, like);
        }
        return Err(Error::Setting(format!(
            "PYROCLAST_INTERFACE is {address}, but MASTER_ADDR is {like}; both must be IPv4 or both IPv6"
        )));
    }
    let all = interfaces()?;
    let found = all.iter().find(|(name, ip)| name == interface && ip.is_ipv4() == like.is_ipv4());
    let ip = found.map(|(_, ip)| *ip).ok_or_else(|| {
        let known: Vec<String> = all.iter().map(|(name, ip)| format!("{name} {ip}")).collect();
        let family = if like.is_ipv4() { "IPv4" } else { "IPv6" };
        Error::Setting(format!(
            "no interface `{interface}` with an {family} address as MASTER_ADDR has; there are {}",
            known.join(", ")
        ))
    })?;
    reachable(ip, like)
}

/// Refuses an address that only this machine reaches where the others may be elsewhere.
fn reachable(ip: IpAddr, master: IpAddr) -> Result<IpAddr, Error> {
    if ip.is_loopback() && !master.is_loopback() {
        return Err(Error::Setting(format!(
            "PYROCLAST_INTERFACE means {ip}, which other machines cannot reach, but MASTER_ADDR is {master}"
        )));
    }
    Ok(ip)
}

#[cfg(unix)]
fn interfaces() -> Result<Vec<(String, IpAddr)>, Error> {
    let all = nix::ifaddrs::getifaddrs()
        .map_err(|error| Error::Setting(format!("listing the interfaces: {error}")))?;
    let named = |interface: nix::ifaddrs::InterfaceAddress| {
        let address = interface.address?;
        let v4 = address.as_sockaddr_in().map(|v4| IpAddr::V4(v4.ip()));
        let v6 = || address.as_sockaddr_in6().map(|v6| IpAddr::V6(v6.ip()));
        Some((interface.interface_name, v4.or_else(v6)?))
    };
    Ok(all.filter_map(named).collect())
}

#[cfg(not(unix))]
fn interfaces() -> Result<Vec<(String, IpAddr)>, Error> {
    let problem = "names of interfaces are known on Unix only; give the address instead";
    Err(Error::Setting(problem.to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_addresses_are_found_or_refused_with_what_there_is() {
        let local = IpAddr::from([127, 0, 0, 1]);
        assert_eq!(of_interface("10.1.2.3", local), Ok(IpAddr::from([10, 1, 2, 3])));
        let error = of_interface("::1", local).expect_err("another family").to_string();
        assert!(error.contains("both IPv6"), "{error}");
        assert_eq!(resolve("127.0.0.1:80"), Ok(SocketAddr::from((local, 80))));
        assert_eq!(resolve("[::1]:80").map(|a| a.is_ipv6()), Ok(true));
        let error = of_interface("nonesuch0", local).expect_err("no such interface").to_string();
        assert!(error.contains("`nonesuch0`"), "{error}");
        let elsewhere = IpAddr::from([10, 0, 0, 1]);
        assert!(of_interface("127.0.0.1", elsewhere).is_err(), "only this machine reaches it");
        let none = ["127.0.0.1", "127.0.0.1:99999", ":", "0.0.0.0:80", "224.0.0.1:80", "[::]:80"];
        for master in none {
            let error = resolve(master).expect_err(master).to_string();
            assert!(error.contains("MASTER_ADDR"), "{error}");
        }
        #[cfg(target_os = "linux")]
        assert_eq!(of_interface("lo", local), Ok(local));
    }
}
