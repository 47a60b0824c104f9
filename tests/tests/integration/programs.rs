//! Programs that are interrupted, panic, or use several pools.

use std::{
    io::Write,
    process::Command,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
        mpsc,
    },
    thread,
    time::{Duration, Instant},
};

use burn::tensor::{Device, Tensor, TensorData};
use tensord_client::{Lease, LeaseRequest, Pool, data};
use tensord_testkit::cluster::{Cluster, Process};

/// How long a device may be taken after its program was interrupted or has panicked. If the lease had to expire,
/// it would be 30 s.
const FREE_WITHIN: Duration = Duration::from_secs(10);

/// How long the idle program is measured.
const IDLE: Duration = Duration::from_secs(5);

fn sum(device: &Device) -> Result<f32, String> {
    let sum = data::into_data(Tensor::<1>::ones([5], device).sum());
    Ok(sum.map_err(|e| e.to_string())?.try_to_vec().unwrap()[0])
}

#[test]
fn reads_and_uploads_of_other_threads_end_when_the_lease_is_dropped() {
    let cluster = Cluster::start(&["flex"]);
    let pool = cluster.pool();
    for _ in 0..5 {
        let lease = pool.lease(LeaseRequest::devices(1)).unwrap();
        let device = lease.devices()[0].clone();
        let (read, has_read) = mpsc::channel();
        let is_over = Arc::new(AtomicBool::new(false));
        let uploading = {
            let (device, is_over) = (device.clone(), is_over.clone());
            // More than fits into the queue of the bridge, as nothing is read.
            thread::spawn(move || {
                while !is_over.load(Ordering::Relaxed) {
                    let values = TensorData::new(vec![2.0f32; 1 << 20], [1 << 20]);
                    let _uploaded: Tensor<1> = data::from_data(values, &device);
                }
            })
        };
        let reading = thread::spawn(move || {
            loop {
                let values = TensorData::new(vec![1.0f32; 1 << 18], [1 << 18]);
                let mut sum: Tensor<1> = data::from_data(values, &device);
                // The read is behind so many ops that it is under way when the lease is dropped.
                for _ in 0..200 {
                    sum = sum * 1.0;
                }
                if data::into_data(sum).is_err() {
                    return;
                }
                let _ = read.send(());
            }
        });
        has_read.recv_timeout(FREE_WITHIN).unwrap();
        drop(lease);
        is_over.store(true, Ordering::Relaxed);
        let until = Instant::now() + FREE_WITHIN;
        while !reading.is_finished() || !uploading.is_finished() {
            assert!(
                Instant::now() < until,
                "a thread waits for a read or for room"
            );
            thread::sleep(Duration::from_millis(10));
        }
        // Burn's client may panic in a thread that goes on with a device without a server.
        let _ = (reading.join(), uploading.join());
    }
}

/// Prints a line for the test that has started this process.
fn report(line: &str) {
    println!("{line}");
    std::io::stdout().flush().unwrap();
}

fn lease_in_child() -> Lease {
    let lease = Pool::connect_env()
        .unwrap()
        .lease(LeaseRequest::devices(1))
        .unwrap();
    assert_eq!(sum(&lease.devices()[0]), Ok(5.0));
    lease
}

/// Not a test: a program that is interrupted by Ctrl+C.
#[test]
#[ignore = "run as a child process"]
fn helper_program_that_ends_its_lease_on_ctrl_c() {
    let lease = lease_in_child();
    lease.end_on_ctrl_c().unwrap();
    lease.end_on_ctrl_c().unwrap(); // Nothing more.
    report("holding");
    let error = loop {
        if let Err(e) = sum(&lease.devices()[0]) {
            break e;
        }
        thread::sleep(Duration::from_millis(20));
    };
    // The error has several lines.
    report(&format!("read failed: {}", error.replace('\n', " ")));
    report(&format!("ended: {:?}", lease.ended()));
    // A program that does not end by itself.
    thread::sleep(Duration::from_secs(300));
}

/// Not a test: a program that has no such lease any more when it is interrupted.
#[test]
#[ignore = "run as a child process"]
fn helper_program_that_has_dropped_its_lease() {
    let lease = lease_in_child();
    lease.end_on_ctrl_c().unwrap();
    drop(lease);
    report("dropped");
    thread::sleep(Duration::from_secs(300));
}

/// Not a test: a program of which a thread panics.
#[test]
#[ignore = "run as a child process"]
fn helper_program_that_panics() {
    let training = thread::spawn(|| {
        let lease = lease_in_child();
        report("holding");
        std::io::stdin().read_line(&mut String::new()).unwrap();
        panic!("the loss of {:?} is not a number", lease.descriptions());
    });
    assert!(training.join().is_err());
    // The process goes on, so only the unwinding has dropped the lease.
    report("unwound");
    thread::sleep(Duration::from_secs(300));
}

/// Not a test: a program that has a lease and does nothing. It prints what that costs.
#[test]
#[ignore = "run as a child process"]
fn helper_program_that_idles() {
    let lease = lease_in_child();
    // What the first ops have caused is over.
    thread::sleep(Duration::from_secs(2));
    let (processor, traffic) = (processor_time(), lease.traffic());
    let began = Instant::now();
    thread::sleep(IDLE);
    let used = processor_time() - processor;
    let percent = 100 * used.as_millis() / began.elapsed().as_millis();
    let after = lease.traffic();
    let bytes = after.bytes_up + after.bytes_down - traffic.bytes_up - traffic.bytes_down;
    report(&format!("idle: {percent} {bytes}"));
}

/// Returns the processor time of this process, from Linux's `/proc`.
fn processor_time() -> Duration {
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap();
    // The name, in parentheses, may have spaces.
    let (_, fields) = stat.rsplit_once(')').unwrap();
    let field = |at: usize| -> u64 { fields.split_whitespace().nth(at).unwrap().parse().unwrap() };
    let (user, system) = (11, 12);
    // Linux counts in hundredths of a second for programs.
    Duration::from_millis(10 * (field(user) + field(system)))
}

fn start(cluster: &Cluster, helper: &str) -> Process {
    let mut program = Command::new(std::env::current_exe().unwrap());
    let name = format!("programs::{helper}");
    program
        .args(["--ignored", "--exact", "--nocapture", &name])
        .env("TENSORD_URL", cluster.client_url());
    Process::spawn(program, cluster.path("program.log"))
}

fn wait_for_line(program: &Process, part: &str) -> String {
    program.wait_for(part, |line| line.contains(part).then(|| line.to_owned()))
}

/// Requests the only device, and fails unless it is free soon enough.
fn assert_device_is_freed(pool: &Pool, since: Instant) {
    let request = LeaseRequest::devices(1).timeout(Duration::from_secs(20));
    let lease = pool.lease(request).unwrap();
    let taken = since.elapsed();
    assert_eq!(sum(&lease.devices()[0]), Ok(5.0));
    assert!(taken < FREE_WITHIN, "the device was free after {taken:?}");
}

#[test]
fn ctrl_c_ends_the_lease_and_a_second_one_the_program() {
    let cluster = Cluster::start(&["flex"]);
    let pool = cluster.pool();
    let mut program = start(&cluster, "helper_program_that_ends_its_lease_on_ctrl_c");
    wait_for_line(&program, "holding");
    let since = Instant::now();
    program.signal("INT");
    assert_device_is_freed(&pool, since);
    let failed = wait_for_line(&program, "read failed");
    assert!(failed.contains("Ctrl+C ended the lease"), "{failed}");
    let ended = wait_for_line(&program, "ended: ");
    assert!(ended.contains("Ctrl+C ended the lease"), "{ended}");
    program.signal("INT");
    let code = program.exit_code(Duration::from_secs(5));
    assert_eq!(code, None, "a signal has ended it");
}

#[test]
fn ctrl_c_ends_a_program_without_such_a_lease() {
    let cluster = Cluster::start(&["flex"]);
    let mut program = start(&cluster, "helper_program_that_has_dropped_its_lease");
    wait_for_line(&program, "dropped");
    program.signal("INT");
    assert_eq!(program.exit_code(Duration::from_secs(5)), None);
}

#[test]
fn a_panic_ends_the_lease() {
    let cluster = Cluster::start(&["flex"]);
    let pool = cluster.pool();
    let program = start(&cluster, "helper_program_that_panics");
    // Its standard input is empty, so it panics at once.
    wait_for_line(&program, "unwound");
    assert_device_is_freed(&pool, Instant::now());
    let log = program.log();
    assert!(log.contains("is not a number"), "{log}");
}

#[test]
fn an_idle_lease_costs_little() {
    let cluster = Cluster::start(&["flex"]);
    let program = start(&cluster, "helper_program_that_idles");
    let line = wait_for_line(&program, "idle: ");
    let mut figures = line.rsplit(' ').map(|figure| figure.parse::<u128>());
    let (bytes, percent) = (
        figures.next().unwrap().unwrap(),
        figures.next().unwrap().unwrap(),
    );
    // Burn's client polls, which takes 8 % of a core of some hosts. A thread that does not wait takes 100 %.
    assert!(percent < 50, "{percent} % of a core while idle");
    assert!(bytes < 4096, "{bytes} bytes in {IDLE:?}");
}

#[test]
fn a_process_can_use_several_pools() {
    let clusters = [Cluster::start(&["flex"]), Cluster::start(&["flex"])];
    let pools = clusters.each_ref().map(Cluster::pool);
    assert_ne!(pools[0].url().authority(), pools[1].url().authority());
    let leases = pools
        .each_ref()
        .map(|pool| pool.lease(LeaseRequest::devices(1)).unwrap());
    let [first, second] = leases.each_ref().map(|lease| lease.devices()[0].clone());
    assert_ne!(first, second);
    let x: Tensor<1> = data::from_data([1.0f32, 2.0, 3.0], &first);
    let y: Tensor<1> = data::from_data([10.0f32, 20.0, 30.0], &second);
    // A tensor gets from one pool to another by way of the program.
    let sum = x.clone().to_device(&second) + y;
    let sum = data::into_data(sum).unwrap();
    assert_eq!(sum.try_to_vec::<f32>().unwrap(), [11.0, 22.0, 33.0]);
    // One pool is given up, and then its processes stop. The other goes on.
    let [kept, given_up] = leases;
    drop(given_up);
    let [kept_pool, other_pool] = pools;
    drop(other_pool);
    let [kept_cluster, other_cluster] = clusters;
    drop(other_cluster);
    let doubled = data::into_data(x * 2.0).unwrap();
    assert_eq!(doubled.try_to_vec::<f32>().unwrap(), [2.0, 4.0, 6.0]);
    assert_eq!(kept.ended(), None);
    assert_eq!(kept_pool.status().unwrap().workers.len(), 1);
    drop(kept_cluster);
}
