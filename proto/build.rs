//! Compiles the `.proto` files with protox, so that no `protoc` is needed.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let files = ["common", "pool", "worker", "data", "admin"]
        .map(|f| format!("proto/tensord/v1/{f}.proto"));
    println!("cargo:rerun-if-changed=proto");
    let descriptors = protox::compile(files, ["proto"])?;
    let rpc = std::env::var_os("CARGO_FEATURE_RPC").is_some();
    tonic_prost_build::configure()
        .bytes(".")
        // They have secrets; `src/credential.rs` and `src/debug.rs` implement a `Debug` that omits them.
        .skip_debug(["tensord.v1.ClientHello", "tensord.v1.Open"])
        .build_client(rpc)
        .build_server(rpc)
        .build_transport(false)
        .compile_fds(descriptors)?;
    Ok(())
}
