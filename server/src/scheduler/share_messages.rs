//! Conversion of shares of devices between messages and the engine's types, with the checks of those that
//! others send.

use tensord_proto::{
    share::{DeviceShare, WHOLE_PERMILLE},
    v1::{self, Error, ErrorCode},
};
use tensord_scheduler::DeviceGrant;

use super::convert::protocol_error;

/// Returns the part of a device's time that a request is for, in thousandths; `None` for whole devices.
///
/// # Errors
///
/// If it is for all of a device's time or more, or for parts of several devices.
pub(super) fn requested_permille(request: &v1::LeaseRequest) -> Result<Option<u32>, Error> {
    let wrong = |message: String| Err(Error::new(ErrorCode::Protocol, message));
    match (request.share_permille, request.devices) {
        (0, _) => Ok(None),
        (WHOLE_PERMILLE.., _) => wrong(format!(
            "the request is for {} thousandths of a device's time; a share has 1 to 999",
            request.share_permille
        )),
        (permille, 1) => Ok(Some(permille)),
        (_, devices) => wrong(format!(
            "the request is for a share of {devices} devices; a share is of one device"
        )),
    }
}

/// Returns the share that `whose` has, in a sentence; `None` for a whole device.
///
/// # Errors
///
/// If it is no share that a lease can have.
pub(super) fn share(
    whose: &str,
    message: Option<v1::DeviceShare>,
) -> Result<Option<DeviceShare>, Error> {
    match message.map(DeviceShare::try_from).transpose() {
        Ok(share) => Ok(share),
        Err(e) => protocol_error(format!("{whose} is malformed: {e}")),
    }
}

/// Returns a grant of which only the device, the lane and the number matter.
///
/// # Errors
///
/// If there is no such lane.
pub(super) fn ended_grant(message: &v1::DeviceGrant) -> Result<DeviceGrant, Error> {
    let lane = message.share.map(|share| share.lane);
    // The rest of the share may be missing, so any valid one takes its place.
    let checked = lane.map(|lane| v1::DeviceShare {
        permille: 1,
        memory_bytes: 0,
        lane,
    });
    Ok(DeviceGrant {
        index: message.device_index,
        lane: tensord_proto::share::lane(share("a grant that has ended", checked)?),
        grant: tensord_proto::grant::number(message.grant),
    })
}

/// Builds the message of a grant of which only the device, the lane and the number matter.
pub(super) fn ended_grant_message(grant: &DeviceGrant) -> v1::DeviceGrant {
    v1::DeviceGrant {
        device_index: grant.index,
        grant: Some(grant.grant.into()),
        share: (grant.lane > 0).then(|| v1::DeviceShare {
            lane: grant.lane,
            ..v1::DeviceShare::default()
        }),
    }
}

#[cfg(test)]
mod tests {
    use tensord_proto::{grant::GrantNumber, share::MAX_LANES};

    use super::*;

    #[test]
    fn request_is_for_whole_devices_or_a_share_of_one() {
        let more = |permille| {
            format!(
                "the request is for {permille} thousandths of a device's time; a share has 1 to 999"
            )
        };
        let several =
            |n| format!("the request is for a share of {n} devices; a share is of one device");
        let cases = [
            (0, 1, Ok(None)),
            (0, 8, Ok(None)),
            (1, 1, Ok(Some(1))),
            (999, 1, Ok(Some(999))),
            (1000, 1, Err(more(1000))),
            (u32::MAX, 2, Err(more(u32::MAX))),
            (500, 0, Err(several(0))),
            (500, 2, Err(several(2))),
        ];
        for (share_permille, devices, expected) in cases {
            let request = v1::LeaseRequest {
                devices,
                share_permille,
                ..v1::LeaseRequest::default()
            };
            let permille = requested_permille(&request).map_err(|error| error.message);
            assert_eq!(permille, expected, "{share_permille} of {devices}");
        }
    }

    #[test]
    fn malformed_share_is_refused() {
        let message = |permille, lane| {
            Some(v1::DeviceShare {
                permille,
                memory_bytes: 7,
                lane,
            })
        };
        assert_eq!(share("the share", None), Ok(None));
        let known = share("the share", message(250, 2)).unwrap().unwrap();
        assert_eq!(
            (known.permille, known.memory_bytes, known.lane),
            (250, 7, 2)
        );
        for (permille, lane) in [(0, 1), (1000, 1), (500, 0), (500, MAX_LANES + 1)] {
            let error = share("the share", message(permille, lane)).unwrap_err();
            assert_eq!(error.code(), ErrorCode::Protocol);
            let words = "the share is malformed: a share has ";
            assert!(error.message.starts_with(words), "{error}");
        }
    }

    #[test]
    fn grant_that_has_ended_has_a_lane_alone() {
        let grant = GrantNumber { term: 1, count: 2 };
        for lane in [0, 1, MAX_LANES] {
            let ended = DeviceGrant {
                index: 3,
                lane,
                grant,
            };
            let message = ended_grant_message(&ended);
            assert_eq!(
                message.share.map(|share| share.permille),
                (lane > 0).then_some(0)
            );
            assert_eq!(ended_grant(&message), Ok(ended));
        }
        for lane in [0, MAX_LANES + 1] {
            let share = Some(v1::DeviceShare {
                lane,
                ..v1::DeviceShare::default()
            });
            let message = v1::DeviceGrant {
                device_index: 3,
                grant: Some(grant.into()),
                share,
            };
            assert!(ended_grant(&message).is_err(), "lane {lane}");
        }
    }
}
